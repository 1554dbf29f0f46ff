"""Humanity's Last Exam: ``{id, question, image, answer, answer_type, ..}``, as in cais/hle; questions with an image are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, identity, kept, text
from afm.datasets.schema import Task
from afm.errors import DataError


def _read(row: Mapping[str, Any], default: str) -> Task:
    if row.get("image"):
        raise DataError("`image` is set: the question is about an image")
    return Task(
        id=identity(row, default, "id"),
        question=text(row, "question"),
        ground_truth=[text(row, "answer")],
        data_source="hle",
        extra_info=kept(row, "answer_type", "category"),
    )


HLE = Reader("hle", "hle", _read)
