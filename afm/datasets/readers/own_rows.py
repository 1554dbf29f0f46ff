"""Rows in this project's layouts, in AFM's RL layout, and in anybody's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, abbreviate, text_field
from afm.datasets.schema import Task, solution_result, task_of_row
from afm.errors import DataError, suggestion


def _read_afm_rl(row: Mapping[str, Any], default: str) -> Task:
    """AFM's RL sets and benchmark files, and raw rows of questions: every layout that :mod:`afm.datasets.schema` reads."""
    return task_of_row(row, default_id=default)


AFM_RL = Reader("afm_rl", "", _read_afm_rl)


QUESTION_KEY = "question"
ANSWER_KEY = "answer"


def plain_reader(question_key: str = QUESTION_KEY, answer_key: str = ANSWER_KEY) -> Reader:
    """A reader of rows with these two keys; ``id`` and ``data_source`` are kept where a row has them.

    An answer may be a text, a number, a list of accepted texts or an object (``{"target": [..]}``, tests of a program). A text
    of several lines that ends in ``#### 18`` is a worked solution, as in GSM8K, and ``18`` the answer.
    """

    def read(row: Mapping[str, Any], default: str) -> Task:
        for key in (question_key, answer_key):
            if key not in row:
                raise DataError(f"no value under {key!r}; {suggestion(key, row)}")
        known = {key: row[key] for key in ("id", "data_source") if row.get(key) is not None}
        answer = row[answer_key]
        if not _says_something(answer):
            raise DataError(f"`{answer_key}`: expected an answer, got {abbreviate(answer)}")
        if isinstance(answer, str) and "\n" in answer.strip():
            answer = solution_result(answer) or answer
        return task_of_row(
            {**known, "question": text_field(row, question_key), "answer": answer},
            default_id=default,
        )

    return Reader("plain", "", read)


def _says_something(answer: Any) -> bool:
    if isinstance(answer, list | tuple):
        return any(map(_says_something, answer))
    return bool(answer.strip()) if isinstance(answer, str) else answer not in (None, {})


PLAIN = plain_reader()
