"""Rows of anybody's own: a question under one key, its answer under another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader
from afm.datasets.schema import Task, task_of_row
from afm.errors import DataError, suggestion

QUESTION_KEY = "question"
ANSWER_KEY = "answer"


def plain_reader(question_key: str = QUESTION_KEY, answer_key: str = ANSWER_KEY) -> Reader:
    """A reader of rows with these two keys; ``id`` and ``data_source`` are kept where a row has them.

    An answer may be a text, a number, a list of accepted texts or an object (``{"target": [..]}``, tests of a program).
    """

    def read(row: Mapping[str, Any], default: str) -> Task:
        for key in (question_key, answer_key):
            if row.get(key) is None:
                raise DataError(f"no value under {key!r}; {suggestion(key, row)}")
        known = {key: row[key] for key in ("id", "data_source") if row.get(key) is not None}
        answer = row[answer_key]
        if answer in ("", [], {}):
            raise DataError(f"`{answer_key}`: expected an answer, got {answer!r}")
        return task_of_row(
            {**known, "question": row[question_key], "answer": answer},
            default_id=default,
        )

    return Reader("plain", "", read)


PLAIN = plain_reader()
