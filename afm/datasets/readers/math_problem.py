"""Sets of mathematical problems: a problem, its answer, and little else, under the names that the benchmarks use.

MATH-500 and AIME 2025 (``problem``, ``answer``), AIME 2024 (``Problem``, ``Answer``), AMC 23 (``question``, ``answer``) and
OlympiadBench (``question``, ``final_answer``: a list; several parts are one answer, joined by commas).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, identity, kept, listed, shown, text
from afm.datasets.schema import Task
from afm.errors import DataError

_ANSWERS = ("answer", "Answer", "final_answer")


def _read(row: Mapping[str, Any], default: str) -> Task:
    return Task(
        id=identity(row, default, "unique_id", "ID", "id"),
        question=text(row, "problem", "Problem", "question"),
        ground_truth=_answer(row),
        extra_info=kept(row, "subject", "level", "subfield"),
    )


def _answer(row: Mapping[str, Any]) -> str:
    value = next((row[key] for key in _ANSWERS if row.get(key) is not None), None)
    parts = [_number(part) for part in listed(value) if part is not None]
    answer = ", ".join(part for part in parts if part)
    if not answer:
        raise DataError(f"`{_ANSWERS[0]}`: expected an answer, got {shown(value)}")
    return answer


def _number(value: Any) -> str:
    """A text; whole numbers that a table holds as 27.0 are written 27."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


MATH_PROBLEM = Reader("math_problem", "", _read)
