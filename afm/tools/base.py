"""The interface of a tool, independent of any training engine, and the goal of the episode that calls it.

The goal is the question and the agent's last thought, for tools whose answer depends on it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

from pydantic import Field

from afm.configuration import Settings
from afm.errors import OwnCodeError
from afm.sandbox import Sandbox

SharedT = TypeVar("SharedT")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returned.

    Attributes:
        text: Shown to the agent as the observation (raw: the rollout loop neutralises tags and cuts it).
        ok: False when the tool's infrastructure failed; ``text`` then describes the failure. A program that
            crashed inside the sandbox is a successful call whose text is the traceback.
        meta: Extra facts for logs (exit status, hits, cache state).
    """

    text: str
    ok: bool = True
    meta: Mapping[str, Any] = field(default_factory=dict)


def checked_result(tool: str, result: object) -> ToolResult:
    """``result``, if it is what a tool must return.

    Raises:
        OwnCodeError: It is something else.
    """
    if isinstance(result, ToolResult) and isinstance(result.text, str):
        return result
    got = (
        f"ToolResult({type(result.text).__name__})"
        if isinstance(result, ToolResult)
        else type(result).__name__
    )
    raise OwnCodeError(f"the tool {tool!r} returned {got}; expected ToolResult(text) with a string")


async def call_tool(name: str, tool: Tool, argument: str) -> ToolResult:
    """Call a tool. A call that takes long is reported in the log while it runs.

    Raises:
        OwnCodeError: The tool returned something else than a :class:`ToolResult`.
    """
    with _SLOW_CALLS.watching(name):
        return checked_result(name, await tool.call(argument))


class SlowCalls:
    """Warns of calls that have not come back, also while one of them blocks the event loop.

    Args:
        patience_s: Seconds until the first warning about a tool. The next one comes when the wait has doubled.
    """

    def __init__(self, patience_s: float = 30.0) -> None:
        self._patience_s = patience_s
        self._begun: dict[object, tuple[str, float]] = {}
        self._next: dict[str, float] = {}
        self._lock = Lock()
        self._watcher: Thread | None = None

    @contextmanager
    def watching(self, tool: str) -> Iterator[None]:
        """Watch one call of ``tool``."""
        call = object()
        with self._lock:
            self._begun[call] = tool, time.monotonic()
            if self._watcher is None:
                self._watcher = Thread(target=self._watch, name="slow-calls", daemon=True)
                self._watcher.start()
        try:
            yield
        finally:
            with self._lock:
                del self._begun[call]

    def _watch(self) -> None:
        while True:
            time.sleep(self._patience_s / 2)
            for message in self._overdue(time.monotonic()):
                _LOG.warning("%s", message)

    def _overdue(self, now: float) -> list[str]:
        """The warnings that are due, one for each tool."""
        waits: dict[str, list[float]] = {}
        with self._lock:
            for tool, begun in self._begun.values():
                if now - begun >= self._patience_s:
                    waits.setdefault(tool, []).append(now - begun)
        self._next = {tool: due for tool, due in self._next.items() if tool in waits}
        due = {tool: seconds for tool, seconds in waits.items() if now >= self._next.get(tool, 0.0)}
        self._next |= {tool: now + max(seconds) for tool, seconds in due.items()}
        return [
            f"waiting for the tool {tool!r} ({max(seconds):.0f} s"
            + (f", {len(seconds)} calls)" if len(seconds) > 1 else ")")
            for tool, seconds in due.items()
        ]


_LOG = logging.getLogger(__name__)
_SLOW_CALLS = SlowCalls()


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


class FunctionSchema(Settings):
    """What a model sees of a tool: the ``function`` part of an OpenAI tool."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})

    def argument(self, named: Mapping[str, Any]) -> str:
        """The text a tool is called with for named arguments: the only parameter's text, or all as a JSON object.

        Raises:
            ValueError: An argument is unknown or missing.
        """
        names = list(self.parameters.get("properties", {}))
        unknown = sorted(set(named) - set(names))
        if unknown:
            raise ValueError(f"unknown argument {unknown[0]!r}; expected: {', '.join(names) or 'none'}")
        if len(names) != 1:
            return json.dumps(named, ensure_ascii=False)
        if names[0] not in named:
            raise ValueError(f"argument {names[0]!r} is missing")
        value = named[names[0]]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class ToolSchema(Settings):
    """An OpenAI tool declaration."""

    type: Literal["function"] = "function"
    function: FunctionSchema


@dataclass(slots=True)
class ToolContext:
    """What a tool class gets in addition to its own settings.

    Attributes:
        label: File and key path of its settings, for errors: ``tools.yaml`` and ``tools[0].config``.
        opened: What tools of this file opened so far (sandboxes, connections), by settings.
    """

    label: str
    at: str
    schema: ToolSchema
    opened: dict[str, Any] = field(default_factory=dict)

    def shared(self, settings: Mapping[str, Any], opener: Callable[[], SharedT]) -> SharedT:
        """What an earlier tool opened with equal ``settings``, or something new."""
        key = json.dumps(settings, sort_keys=True, default=str)
        if key not in self.opened:
            self.opened[key] = opener()
        return cast("SharedT", self.opened[key])

    def sandbox(self, settings: Mapping[str, Any], opener: Callable[[], Sandbox]) -> Sandbox:
        """The sandbox for ``settings``; see :meth:`shared`."""
        return self.shared({"sandbox": dict(settings)}, opener)


class ConfiguredTool(Protocol):
    """A class that the registry can make tools of."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> Tool:
        """A tool with these settings; raises ``ConfigError`` for wrong ones."""
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
