"""CodeContests: ``{name, description, public_tests, private_tests, generated_tests, ..}``, as in deepmind/code_contests.

Each ``*_tests`` holds two lists, ``input`` and ``output``. Problems that read or write a named file are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.code_row import checked_tests, with_starter_code
from afm.datasets.readers.row import Reader, kept, text
from afm.datasets.schema import Task
from afm.errors import DataError

_TESTS = ("public_tests", "private_tests", "generated_tests")


def _read(row: Mapping[str, Any], default: str) -> Task:
    for key in ("input_file", "output_file"):
        if row.get(key):
            raise DataError(f"`{key}` is {row[key]!r}: the problem does not use standard input and output")
    tests = checked_tests(kept(row, *_TESTS))
    return Task(
        id=text(row, "name"),
        question=with_starter_code(text(row, "description"), ""),
        ground_truth=tests,
        data_source="codecontests",
        extra_info=_limits(row) | kept(row, "source", "difficulty", "cf_rating"),
    )


def _limits(row: Mapping[str, Any]) -> dict[str, Any]:
    limit = row.get("time_limit")
    if not isinstance(limit, Mapping):
        return {}
    return {"time_limit_s": (limit.get("seconds") or 0) + (limit.get("nanos") or 0) / 1e9}


CODECONTESTS = Reader("codecontests", "codecontests", _read)
