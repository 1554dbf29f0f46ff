"""HotpotQA: ``{id, question, answer, type, level, ..}``, as in hotpotqa/hotpot_qa; its test split has no answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, answers, identity, kept, text
from afm.datasets.schema import Task


def _read(row: Mapping[str, Any], default: str) -> Task:
    return Task(
        id=identity(row, default, "id", "_id"),
        question=text(row, "question"),
        ground_truth=answers(row, "answer", [row.get("answer")]),
        data_source="hotpotqa",
        extra_info=kept(row, "type", "level"),
    )


HOTPOTQA = Reader("hotpotqa", "hotpotqa", _read)
