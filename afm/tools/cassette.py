"""Tool calls recorded once and replayed for free: the same answers, in evaluation and in training.

A cassette is one file (:mod:`afm.tools.tape`). In a tools YAML::

    cassette: {file: runs/gaia.cassette, mode: replay, on_miss: error}
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from afm.errors import ReplayError
from afm.tools.base import ContextTool, Tool, ToolResult
from afm.tools.tape import Cassette, Recorded, normalised

__all__ = [
    "Cassette",
    "CassetteSettings",
    "CassetteTool",
    "Goal",
    "Mode",
    "OnMiss",
    "Recorded",
    "Staleness",
    "normalised",
    "staleness",
    "tool_version",
]


class Mode(StrEnum):
    """What a cassette is used for."""

    RECORD = "record"
    """Every call is made and recorded; what was recorded before is replaced."""
    REPLAY = "replay"
    """Recorded calls are answered from the cassette."""


class OnMiss(StrEnum):
    """What becomes of a call that is not on the cassette."""

    ERROR = "error"
    """The episode ends with an error."""
    LIVE = "live"
    """The call is made, and recorded."""
    EMPTY = "empty"
    """The agent is told that nothing was found."""


class Goal(StrEnum):
    """Which recorded call answers that of a tool whose answer depends on what the episode is after."""

    SAME = "same"
    """One toward the same goal."""
    ANY = "any"
    """The latest toward another goal, too, if there is none: for agents that word their thoughts anew each time."""


class CassetteSettings(BaseModel):
    """The ``cassette`` part of a tools YAML; a path alone stands for ``{file: PATH}``.

    Attributes:
        file: The cassette.
        mode: Record or replay.
        on_miss: For replay.
        goal: Likewise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: Path
    mode: Mode = Mode.REPLAY
    on_miss: OnMiss = OnMiss.ERROR
    goal: Goal = Goal.SAME


def tool_version(class_name: str, config: Mapping[str, Any]) -> str:
    """Digest of what a tool is; a call recorded under another one is stale."""
    text = json.dumps([class_name, config], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class CassetteTool:
    """A tool behind a cassette.

    Args:
        tool: The real one; called when recording, and on a miss that is answered live.
        version: See :func:`tool_version`.
    """

    def __init__(self, tool: Tool, cassette: Cassette, settings: CassetteSettings, version: str) -> None:
        self._tool = tool
        self._cassette = cassette
        self._settings = settings
        self._version = version

    @property
    def name(self) -> str:
        """That of the tool."""
        return self._tool.name

    async def call(self, argument: str) -> ToolResult:
        """See :class:`afm.tools.base.Tool`; ``meta`` says ``cassette``: hit, miss or recorded, and ``stale``.

        Stale is a hit that was recorded with other settings of the tool, toward another goal, or toward an unknown one.

        Raises:
            ReplayError: The call is not on the cassette, and ``on_miss`` is ``error``.
        """
        context = self._tool.context() if isinstance(self._tool, ContextTool) else ""
        if self._settings.mode is Mode.REPLAY:
            found = await self._found(argument, context)
            if found is not None:
                return found
            if self._settings.on_miss is OnMiss.ERROR:
                toward = " toward this goal" if context else ""
                or_any = ", or cassette.goal to any" if context else ""
                raise ReplayError(
                    f"{self._settings.file}: no recorded call of {self.name} with argument "
                    f"{normalised(argument)[:200]!r}{toward}; record it, or set cassette.on_miss to live or empty{or_any}"
                )
            if self._settings.on_miss is OnMiss.EMPTY:
                return ToolResult("Nothing was found.", meta={"cassette": "miss"})
        result = await self._tool.call(argument)
        if result.ok:  # a failure of the infrastructure would be replayed for ever
            call = Recorded(self.name, argument, result, self._version, time.time(), context)
            await self._cassette.add(call)
        return ToolResult(result.text, result.ok, {**result.meta, "cassette": "recorded"})

    async def _found(self, argument: str, context: str) -> ToolResult | None:
        any_context = self._settings.goal is Goal.ANY
        found = await self._cassette.find(self.name, argument, context, any_context=any_context)
        if found is None:
            return None
        stale = found.version != self._version or not self._cassette.same(found.context, context)
        meta = {**found.result.meta, "cassette": "hit", "stale": stale}
        return ToolResult(found.result.text, found.result.ok, meta)

    async def close(self) -> None:
        """Close the tool and the cassette."""
        await self._tool.close()
        await asyncio.to_thread(self._cassette.close)


@dataclass(frozen=True, slots=True)
class Staleness:
    """How old the calls of one tool are.

    Attributes:
        calls: Number recorded.
        oldest: Seconds since the epoch.
        newest: Likewise.
        outdated: Calls recorded longer ago than allowed.
        versions: Calls by version of the tool; more than one means that its settings changed in between.
    """

    calls: int
    oldest: float
    newest: float
    outdated: int
    versions: Mapping[str, int]


def staleness(cassette: Cassette, max_age_s: float, now: float | None = None) -> dict[str, Staleness]:
    """How old a cassette's calls are, by tool."""
    limit = (time.time() if now is None else now) - max_age_s
    by_tool: dict[str, list[Recorded]] = {}
    for call in cassette.calls():
        by_tool.setdefault(call.tool, []).append(call)
    return {tool: _staleness(calls, limit) for tool, calls in sorted(by_tool.items())}


def _staleness(calls: list[Recorded], limit: float) -> Staleness:
    times = [call.recorded_at for call in calls]
    versions: dict[str, int] = {}
    for call in calls:
        versions[call.version] = versions.get(call.version, 0) + 1
    return Staleness(len(calls), min(times), max(times), sum(time < limit for time in times), versions)
