"""What an episode is after, for tools whose answer depends on it: the question, and the agent's last thought."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

MAX_GOAL_CHARS = 4_000

_goal: ContextVar[str] = ContextVar("goal", default="")


@contextmanager
def working_toward(question: str, thought: str) -> Iterator[None]:
    """Let tools that are called inside know the goal. Episodes that run at the same time do not mix."""
    text = f"{question.strip()}\n{thought.strip()}".strip()
    token = _goal.set(text[:MAX_GOAL_CHARS])
    try:
        yield
    finally:
        _goal.reset(token)


def current_goal() -> str:
    """The goal of the episode that calls; empty outside of one."""
    return _goal.get()
