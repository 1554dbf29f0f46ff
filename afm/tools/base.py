"""The interface of a tool, independent of any training engine, and the goal of the episode that calls it.

The goal is the question and the agent's last thought. Some tools answer depending on it.
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

from pydantic import Field, field_validator

from afm.configuration import Settings
from afm.errors import OwnCodeError
from afm.plugins import code_place
from afm.sandbox import Sandbox

SharedT = TypeVar("SharedT")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call.

    Attributes:
        text: The observation for the agent. The rollout loop neutralises tags in it and shortens it.
        ok: False if the tool's infrastructure failed, in which case ``text`` describes the failure. A program that
            crashed inside the sandbox is a successful call whose text is the traceback.
        meta: Further facts for logs, such as exit status, hits and cache state.
    """

    text: str
    ok: bool = True
    meta: Mapping[str, Any] = field(default_factory=dict)


def _checked_result(name: str, tool: Tool, result: object) -> ToolResult:
    """Return ``result`` if it is a valid result of a tool.

    Raises:
        OwnCodeError: ``result`` is not a :class:`ToolResult` with a string.
    """
    if isinstance(result, ToolResult) and isinstance(result.text, str):
        return result
    got = (
        f"ToolResult({type(result.text).__name__})"
        if isinstance(result, ToolResult)
        else type(result).__name__
    )
    raise OwnCodeError(
        f"{code_place(tool.call, type(tool).__name__)} of the tool {name!r} returned {got}; "
        "expected ToolResult(text) with a string. Correct the file and run the command again"
    )


async def call_tool(name: str, tool: Tool, argument: str) -> ToolResult:
    """Call a tool. A call that takes long is reported in the log while it runs.

    Raises:
        OwnCodeError: The tool returned a value that is not a :class:`ToolResult`.
    """
    with _SLOW_CALLS.watching(name):
        return _checked_result(name, tool, await tool.call(argument))


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
        """The name that an agent's role refers to."""
        ...

    async def call(self, argument: str) -> ToolResult:
        """Run the tool once. Expected failures return ``ok=False``, and invalid arguments never raise.

        Raises:
            ReplayError, SandboxUnavailableError: No call can succeed, and the run must end.
        """
        ...

    async def close(self) -> None:
        """Close connections and end processes."""
        ...


@runtime_checkable
class ReadingTool(Protocol):
    """A tool class that can read arguments without settings or a server."""

    @classmethod
    def read(cls, argument: str) -> object:
        """Return the agent's request as :meth:`Tool.call` understands it.

        Raises:
            BadArgumentError: The argument is invalid. The agent reads the message.
        """
        ...


@runtime_checkable
class ContextTool(Tool, Protocol):
    """A tool whose answer depends on more than its argument."""

    def context(self) -> str:
        """Return what the answer depends on in the calling episode. Equal arguments and contexts give equal answers."""
        ...


@runtime_checkable
class TrustedTool(Tool, Protocol):
    """A tool that passes environment variables to other programs or servers."""

    def variables(self) -> tuple[str, ...]:
        """Return the names of the variables. Their values are treated as secret."""
        ...


class FunctionSchema(Settings):
    """A tool as the model sees it: the ``function`` part of an OpenAI tool."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})

    @field_validator("parameters")
    @classmethod
    def _named_parameters(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("properties", {}), dict):
            raise ValueError("expected `properties` to be a mapping of names to JSON schemas")
        return value

    def argument(self, named: Mapping[str, Any]) -> str:
        """Return the argument text for named arguments: the text of the only parameter, or a JSON object of all.

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
    """The context that a tool class gets in addition to its own settings.

    Attributes:
        label: The file of its settings for error messages, such as ``tools.yaml``.
        at: The key path of its settings for error messages, such as ``tools[0].config``.
        opened: Sandboxes and connections that the tools of this file have opened, by settings.
    """

    label: str
    at: str
    schema: ToolSchema
    opened: dict[str, Any] = field(default_factory=dict)

    def shared(self, settings: Mapping[str, Any], opener: Callable[[], SharedT]) -> SharedT:
        """Return the object that an earlier tool opened with equal ``settings``, or open a new one."""
        key = json.dumps(settings, sort_keys=True, default=str)
        if key not in self.opened:
            self.opened[key] = opener()
        return cast("SharedT", self.opened[key])

    def sandbox(self, settings: Mapping[str, Any], opener: Callable[[], Sandbox]) -> Sandbox:
        """Return the sandbox for ``settings``. See :meth:`shared`."""
        return self.shared({"sandbox": dict(settings)}, opener)


class ConfiguredTool(Protocol):
    """A class from which the registry can make tools."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> Tool:
        """Return a tool with these settings. Raises ``ConfigError`` if they are invalid."""
        ...


MAX_GOAL_CHARS = 4_000

_goal: ContextVar[str] = ContextVar("goal", default="")


@contextmanager
def working_toward(question: str, thought: str) -> Iterator[None]:
    """Set the goal for the tools that are called inside. Concurrent episodes do not share it."""
    text = f"{question.strip()}\n{thought.strip()}".strip()
    token = _goal.set(text[:MAX_GOAL_CHARS])
    try:
        yield
    finally:
        _goal.reset(token)


def current_goal() -> str:
    """Return the goal of the calling episode, or an empty text outside of an episode."""
    return _goal.get()
