"""Bamboogle: ``{Question, Answer}``, as in chiayewken/bamboogle; ``{id, Question, answer: [..]}`` of SimpleDeepSearcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, answers, identity, listed, text
from afm.datasets.schema import Task


def _read(row: Mapping[str, Any], default: str) -> Task:
    key = "answer" if "answer" in row else "Answer"
    return Task(
        id=identity(row, default, "id"),
        question=text(row, "Question"),
        ground_truth=answers(row, key, listed(row.get(key))),
        data_source="bamboogle",
    )


BAMBOOGLE = Reader("bamboogle", "bamboogle", _read)
