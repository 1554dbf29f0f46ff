"""TriviaQA: ``{question, question_id, answer: {value, aliases, ..}}``, as in mandarjoshi/trivia_qa."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, answers, identity, kept, listed, mapping, text
from afm.datasets.schema import Task

_HIDDEN = "<unk>"
"""Stands for the answer in the test split."""


def _read(row: Mapping[str, Any], default: str) -> Task:
    answer = mapping(row.get("answer"), "answer")
    named = [answer.get("value"), *listed(answer.get("aliases"))]
    return Task(
        id=identity(row, default, "question_id"),
        question=text(row, "question"),
        ground_truth=answers(row, "answer", (name for name in named if name != _HIDDEN)),
        data_source="triviaqa",
        extra_info=kept(row, "question_source"),
    )


TRIVIAQA = Reader("triviaqa", "triviaqa", _read)
