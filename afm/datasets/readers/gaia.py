"""GAIA: ``{task_id, Question, Level, "Final answer", file_name, ..}``, as in gaia-benchmark/GAIA; the text part alone.

The AFM repository publishes its 103 questions as ``{id, task_id, question, answer, Level, ..}``; SimpleDeepSearcher names
them ``Question`` and holds the answer in a list.

Questions that come with a file are refused: AFM evaluates the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, answers, identity, listed, text
from afm.datasets.schema import Task
from afm.errors import DataError


def _read(row: Mapping[str, Any], default: str) -> Task:
    if row.get("file_name"):
        raise DataError("`file_name` is set: the question is about a file")
    key = "answer" if "answer" in row else "Final answer"
    gold = answers(row, key, listed(row.get(key)))
    if gold == ["?"]:
        raise DataError(f"`{key}` is withheld: the row is of the test split")
    level = row.get("Level")
    return Task(
        id=identity(row, default, "task_id"),
        question=text(row, "Question", "question"),
        ground_truth=gold,
        data_source="gaia",
        extra_info={} if level is None else {"level": str(level)},
    )


GAIA = Reader("gaia", "gaia", _read)
