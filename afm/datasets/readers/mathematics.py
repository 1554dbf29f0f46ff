"""Sets of mathematical problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import (
    Reader,
    abbreviate,
    as_list,
    gold_answer,
    last_question,
    object_field,
    optional_fields,
    row_id,
    text_field,
)
from afm.datasets.schema import Task, solution_result
from afm.errors import DataError


def _read_gsm8k(row: Mapping[str, Any], default: str) -> Task:
    """GSM8K: ``{question, answer}``, as in openai/gsm8k; the answer is a worked solution whose last line is ``#### 18``."""
    solution = text_field(row, "answer")
    result = solution_result(solution)
    if result is None:
        raise DataError(
            f"`answer`: expected a last line like '#### 18', got {solution.splitlines()[-1][:60]!r}"
        )
    return Task(
        id=row_id(row, default, "id"),
        question=text_field(row, "question"),
        ground_truth=result,
        data_source="gsm8k",
    )


GSM8K = Reader("gsm8k", "gsm8k", _read_gsm8k)


_ANSWERS = ("answer", "Answer", "final_answer")


def _read_math_problem(row: Mapping[str, Any], default: str) -> Task:
    """Sets of mathematical problems: a problem, its answer, and little else, under the names that the benchmarks use.

    MATH-500 and AIME 2025 (``problem``, ``answer``), AIME 2024 (``Problem``, ``Answer``), AMC 23 (``question``, ``answer``) and
    OlympiadBench (``question``, ``final_answer``: a list; several parts are one answer, joined by commas).
    """
    return Task(
        id=row_id(row, default, "unique_id", "ID", "id"),
        question=text_field(row, "problem", "Problem", "question"),
        ground_truth=_answer(row),
        extra_info=optional_fields(row, "subject", "level", "subfield"),
    )


def _answer(row: Mapping[str, Any]) -> str:
    value = next((row[key] for key in _ANSWERS if row.get(key) is not None), None)
    parts = [_number(part) for part in as_list(value) if part is not None]
    answer = ", ".join(part for part in parts if part)
    if not answer:
        raise DataError(f"`{_ANSWERS[0]}`: expected an answer, got {abbreviate(value)}")
    return answer


def _number(value: Any) -> str:
    """A text; whole numbers that a table holds as 27.0 are written 27."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


MATH_PROBLEM = Reader("math_problem", "", _read_math_problem)


_BEFORE = "Solve the following math problem step by step."
_BEHIND = 'Remember to put your answer on its own line after "Answer:".'


def _read_dapo_math(row: Mapping[str, Any], default: str) -> Task:
    """DAPO-Math-17k: verl rows whose prompt wraps the problem, as in BytedTsinghua-SIA/DAPO-Math-17k.

    The published file repeats its 17 thousand problems a hundred times, with equal ``extra_info.index``: repetitions are
    counted and left out by :func:`afm.datasets.published.read_published`. The wrapping (an instruction before the problem and
    a reminder behind it) asks for an answer format of its own, which would contradict the agent's, so it is taken away.
    """
    info = object_field(row.get("extra_info") or {}, "extra_info")
    return Task(
        id=row_id(info, default, "index"),
        question=_problem(last_question(row)),
        ground_truth=gold_answer(row),
        data_source="math_dapo",
    )


def _problem(prompt: str) -> str:
    """The problem alone; a prompt without the wrapping as it is."""
    lead, blank, rest = prompt.partition("\n\n")
    body = rest if blank and lead.startswith(_BEFORE) else prompt
    return body.removesuffix(_BEHIND).strip() or prompt


DAPO_MATH = Reader("dapo_math", "math_dapo", _read_dapo_math)
