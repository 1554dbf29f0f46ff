"""Codeforces: the rows of open-r1/codeforces, judged by the official tests and, where there is one, the checker.

Refused are problems that talk to their judge, that read a file, or whose official tests are cut short
(``official_tests_complete`` false), since a wrong program would pass those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.code_row import checked_tests, sections, with_starter_code
from afm.datasets.readers.row import Reader, kept, listed, text
from afm.datasets.schema import Task
from afm.errors import DataError


def _read(row: Mapping[str, Any], default: str) -> Task:
    _refuse(row)
    tests: dict[str, Any] = {"cases": listed(row.get("official_tests"))}
    if row.get("generated_checker"):
        tests["checker"] = row["generated_checker"]
    question = sections(
        ("", text(row, "description")),
        ("Input", row.get("input_format")),
        ("Output", row.get("output_format")),
        ("Examples", _examples(row)),
        ("Note", row.get("note")),
    )
    return Task(
        id=text(row, "id"),
        question=with_starter_code(question, ""),
        ground_truth=checked_tests(tests),
        data_source="codeforces",
        extra_info=kept(row, "title", "rating", "time_limit", "memory_limit", "contest_start_year"),
    )


def _refuse(row: Mapping[str, Any]) -> None:
    if row.get("interaction_format"):
        raise DataError(
            "the problem is interactive (`interaction_format`); programs are run with a fixed input"
        )
    if row.get("input_mode") not in (None, "", "stdio"):
        raise DataError(f"`input_mode` is {row['input_mode']!r}, expected 'stdio'")
    if row.get("official_tests_complete") is False:
        raise DataError("`official_tests_complete` is false: the tests are cut short")


def _examples(row: Mapping[str, Any]) -> str:
    pairs = [pair for pair in listed(row.get("examples")) if isinstance(pair, Mapping)]
    return "\n\n".join(
        f"Input:\n{str(pair.get('input', '')).strip()}\nOutput:\n{str(pair.get('output', '')).strip()}"
        for pair in pairs
    )


CODEFORCES = Reader("codeforces", "codeforces", _read)
