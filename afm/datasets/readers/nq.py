"""Natural Questions (open): ``{question, answer: [..]}``, as in google-research-datasets/nq_open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, answers, identity, listed, text
from afm.datasets.schema import Task


def _read(row: Mapping[str, Any], default: str) -> Task:
    gold = answers(row, "answer", listed(row.get("answer")))
    return Task(
        id=identity(row, default, "id"), question=text(row, "question"), ground_truth=gold, data_source="nq"
    )


NQ = Reader("nq", "nq", _read)
