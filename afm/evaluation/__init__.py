"""Evaluation: run tasks through the one episode loop, measure, compare, report."""

from __future__ import annotations

from afm.evaluation.manifest import Manifest, Sources, read_manifest
from afm.evaluation.metrics import Metrics, summarise
from afm.evaluation.paired import PairedDifference, paired_difference
from afm.evaluation.play import FailurePolicy
from afm.evaluation.run import evaluate
from afm.evaluation.statistics import Interval

__all__ = [
    "FailurePolicy",
    "Interval",
    "Manifest",
    "Metrics",
    "PairedDifference",
    "Sources",
    "evaluate",
    "paired_difference",
    "read_manifest",
    "summarise",
]
