"""What readers of programming problems share: tests that the reward can read, and the text of a problem."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from afm.errors import DataError
from afm.rewards.code_tests.problem import read_problem


def checked_tests(tests: Mapping[str, Any]) -> dict[str, Any]:
    """``tests``, once the reward has read them.

    Raises:
        DataError: There are none, or they are damaged.
    """
    try:
        read_problem(tests)
    except DataError as error:
        raise DataError(f"tests: {error.message}") from None
    return dict(tests)


def count_tests(ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> int:
    """How many tests judge a program: pairs of input and output, calls, and asserts of a test program.

    Raises:
        DataError: There are none, or they are damaged.
    """
    problem = read_problem(ground_truth, extra_info)
    pairs = len(problem.printing) + len(problem.calling)
    try:
        return pairs + sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(problem.tests)))
    except (SyntaxError, ValueError, RecursionError):
        return pairs


def with_starter_code(question: str, starter: str) -> str:
    """The question and the code that the program has to begin with."""
    if not starter.strip():
        return f"{question}\n\nThe program reads standard input and writes its answer to standard output."
    return f"{question}\n\nComplete this code:\n```py\n{starter.rstrip()}\n```"


def sections(*parts: tuple[str, Any]) -> str:
    """The parts that are there, each under its title; the first one has none."""
    texts = []
    for title, body in parts:
        if isinstance(body, str) and body.strip():
            texts.append(f"{title}\n{body.strip()}" if title else body.strip())
    return "\n\n".join(texts)
