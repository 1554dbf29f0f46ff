"""Trajectories: conversion between text and steps, rules, final answers, and files."""

from __future__ import annotations

from afm.trajectory.answer import answers
from afm.trajectory.io import RecordWriter, append_record, load_records, read_records
from afm.trajectory.observation import neutralise, observation_text, readable, render
from afm.trajectory.record import Record, StopReason
from afm.trajectory.tags import (
    Author,
    Segment,
    Step,
    StepClosed,
    StepOpened,
    StreamEvent,
    StreamParser,
    Trajectory,
    author_segments,
)
from afm.trajectory.validate import parse, structure_faults, validate

__all__ = [
    "Author",
    "Record",
    "RecordWriter",
    "Segment",
    "Step",
    "StepClosed",
    "StepOpened",
    "StopReason",
    "StreamEvent",
    "StreamParser",
    "Trajectory",
    "answers",
    "append_record",
    "author_segments",
    "load_records",
    "neutralise",
    "observation_text",
    "parse",
    "read_records",
    "readable",
    "render",
    "structure_faults",
    "validate",
]
