"""Questions that a model was fine-tuned on, found in whichever file they stand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from afm.datasets import read_tasks
from afm.datasets.schema import question_of_prompt
from afm.distill.signs import with_marks
from afm.errors import DataError
from afm.rewards.exact_match import comparable
from afm.trajectory.rows import json_rows

_JOINS = re.compile(r"[-/\u2010-\u2014]")
"""What parts two words as a blank does."""


def question_key(question: str) -> str:
    """The same for questions that differ in letter case, punctuation, articles, layout and forms of letters alone.

    Signs that make another question (operators, decimal points) are no punctuation, see :func:`afm.distill.signs.with_marks`.
    """
    return comparable(_JOINS.sub(" ", with_marks(question)))


def known_questions(files: Iterable[Path]) -> set[str]:
    """Keys of all questions of trajectories, alpaca rows (the text behind ``Question:``), or tasks; JSON, JSONL or parquet.

    Raises:
        DataError: A row holds no question, or a file cannot be read.
    """
    return {question_key(question) for file in files for question in _questions(file)}


def _questions(file: Path) -> Iterator[str]:
    if file.suffix == ".parquet":
        yield from (task.question for task in read_tasks(file))
        return
    for line, row in json_rows(file):
        if isinstance(row, DataError):
            raise row
        yield _question(row, file, line)


def _question(row: Any, file: Path, line: int) -> str:
    if isinstance(row, dict):
        question, instruction = row.get("question"), row.get("instruction")
        if isinstance(question, str) and question.strip():
            return question
        if isinstance(instruction, str) and instruction.strip():
            asked = row.get("input")
            return question_of_prompt(asked if isinstance(asked, str) and asked.strip() else instruction)
    raise DataError(
        "no question; expected `question`, or `instruction` of an alpaca row", path=str(file), line=line
    )
