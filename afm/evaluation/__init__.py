"""Evaluation: play tasks in the episode loop, measure, compare and report.

``metrics`` has the figures of a run, ``tallies`` the counts over single episodes, ``statistics`` the estimators.
"""

from __future__ import annotations

from afm.evaluation.manifest import Conditions, RunManifest, Sources, read_manifest
from afm.evaluation.metrics import Metrics, summarise
from afm.evaluation.paired import PairedDifference, paired_difference
from afm.evaluation.run import evaluate
from afm.evaluation.statistics import Interval
from afm.play import FailurePolicy

__all__ = [
    "Conditions",
    "FailurePolicy",
    "Interval",
    "Metrics",
    "PairedDifference",
    "RunManifest",
    "Sources",
    "evaluate",
    "paired_difference",
    "read_manifest",
    "summarise",
]
