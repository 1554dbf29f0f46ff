"""The interface of a tool, independent of any training engine, and the goal of the episode that calls it.

The goal is the question and the agent's last thought, for tools whose answer depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returned.

    Attributes:
        text: Shown to the agent as the observation (raw: the rollout loop neutralises tags and cuts it).
        ok: False when the tool's infrastructure failed; then ``text`` says so in words. A program that
            crashed inside the sandbox is a successful call whose text is the traceback.
        meta: Extra facts for logs (exit status, hits, cache state).
    """

    text: str
    ok: bool = True
    meta: Mapping[str, Any] = field(default_factory=dict)


class Tool(Protocol):
    """One tool. ``argument`` is the raw text between the tool's tags."""

    @property
    def name(self) -> str:
        """The name an agent's role refers to."""
        ...

    async def call(self, argument: str) -> ToolResult:
        """Run once. Expected failures come back as ``ok=False``; never raises for bad arguments.

        Raises:
            ReplayError, SandboxUnavailableError: No call can succeed; the run must end.
        """
        ...

    async def close(self) -> None:
        """Free connections and processes."""
        ...


@runtime_checkable
class ReadingTool(Protocol):
    """A class of tools with a reader of its arguments, which needs neither settings nor a server."""

    @classmethod
    def read(cls, argument: str) -> object:
        """What an agent asks for, as :meth:`Tool.call` understands it.

        Raises:
            BadArgumentError: The tool can do nothing with it; the agent reads the message.
        """
        ...


@runtime_checkable
class ContextTool(Tool, Protocol):
    """A tool whose answer depends on more than its argument."""

    def context(self) -> str:
        """What it depends on in the episode that calls; calls with equal arguments and contexts are alike."""
        ...


@runtime_checkable
class TrustedTool(Tool, Protocol):
    """A tool that hands variables of the environment to others."""

    def variables(self) -> tuple[str, ...]:
        """Their names; what they hold is taken as secret."""
        ...


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
