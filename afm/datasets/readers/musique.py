"""MuSiQue: ``{id, question, answer, answer_aliases, answerable, question_decomposition, ..}``, as in dgslibisey/MuSiQue.

The full variant also holds questions that its paragraphs do not answer; those are refused.
SimpleDeepSearcher publishes 500 questions as ``{id, Question, answer: [..], source}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, answers, identity, listed, text
from afm.datasets.schema import Task
from afm.errors import DataError


def _read(row: Mapping[str, Any], default: str) -> Task:
    if row.get("answerable") is False:
        raise DataError("`answerable` is false: the question has no answer in its paragraphs")
    steps = listed(row.get("question_decomposition"))
    return Task(
        id=identity(row, default, "id"),
        question=text(row, "question", "Question"),
        ground_truth=answers(row, "answer", [*listed(row.get("answer")), *listed(row.get("answer_aliases"))]),
        data_source="musique",
        extra_info={"hops": len(steps)} if steps else {},
    )


MUSIQUE = Reader("musique", "musique", _read)
