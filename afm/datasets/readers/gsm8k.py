"""GSM8K: ``{question, answer}``, as in openai/gsm8k; the answer is a worked solution whose last line is ``#### 18``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, identity, text
from afm.datasets.schema import Task, solution_result
from afm.errors import DataError


def _read(row: Mapping[str, Any], default: str) -> Task:
    solution = text(row, "answer")
    result = solution_result(solution)
    if result is None:
        raise DataError(
            f"`answer`: expected a last line like '#### 18', got {solution.splitlines()[-1][:60]!r}"
        )
    return Task(
        id=identity(row, default, "id"),
        question=text(row, "question"),
        ground_truth=result,
        data_source="gsm8k",
    )


GSM8K = Reader("gsm8k", "gsm8k", _read)
