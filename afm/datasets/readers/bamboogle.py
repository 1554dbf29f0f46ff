"""Bamboogle: ``{Question, Answer}``, as in chiayewken/bamboogle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, answers, text
from afm.datasets.schema import Task


def _read(row: Mapping[str, Any], default: str) -> Task:
    gold = answers(row, "Answer", [row.get("Answer")])
    return Task(id=default, question=text(row, "Question"), ground_truth=gold, data_source="bamboogle")


BAMBOOGLE = Reader("bamboogle", "bamboogle", _read)
