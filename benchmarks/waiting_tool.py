"""A tool for bench_rollout.py that waits 0.2 to 2 seconds, always the same time for the same call of an episode."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from afm.configuration import validated
from afm.tools import ToolContext, ToolResult
from afm.tools.base import current_goal

SHORTEST_S, LONGEST_S = 0.2, 2.0


def wait_s(episode: int, turn: int) -> float:
    """Return the seconds that a call takes."""
    return random.Random(f"{episode}/{turn}").uniform(SHORTEST_S, LONGEST_S)


class WaitSettings(BaseModel):
    """``config`` of the tool.

    Attributes:
        share: Share of the seconds to really wait; 0 for a tool that takes no time.
        together: Number of calls that begin and end together, as in a turn-by-turn rollout; 1 for separate calls.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = 1.0
    together: int = 1


class WaitTool:
    """Waits, and then answers."""

    name = "wait"

    def __init__(self, settings: WaitSettings) -> None:
        self._settings = settings
        self._round = asyncio.Barrier(settings.together)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> WaitTool:
        """See :class:`afm.tools.base.ConfiguredTool`."""
        return cls(validated(WaitSettings, dict(config), context.label, context.at))

    async def call(self, argument: str) -> ToolResult:
        """Wait the time of this call of this episode; ``argument`` has the number of the call."""
        [episode] = re.findall(r"Episode (\d+)", current_goal())
        [turn] = re.findall(r"\d+", argument)
        if self._settings.together > 1:
            await self._round.wait()
        await asyncio.sleep(self._settings.share * wait_s(int(episode), int(turn)))
        if self._settings.together > 1:
            await self._round.wait()
        return ToolResult(f"waited {turn}")

    async def close(self) -> None:
        """Do nothing; there is nothing to close."""
