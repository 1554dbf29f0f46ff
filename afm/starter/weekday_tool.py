"""The tool: a class with a name and an async ``call`` that takes text and returns text."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from afm.tools import ToolResult
from afm.tools.base import ToolContext


class WeekdayTool:
    """Names the weekday of a date such as 2024-02-29."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> WeekdayTool:
        """Make the tool from its entry in tools.yaml."""
        return cls(context.schema.function.name)

    async def call(self, argument: str) -> ToolResult:
        """Return the weekday, or for wrong input a message that lets the agent try again."""
        try:
            return ToolResult(f"{date.fromisoformat(argument.strip()):%A}")
        except ValueError:
            return ToolResult(f"{argument.strip()!r} is not a date; send one such as 2024-02-29")

    async def close(self) -> None:
        """Release resources. This tool holds none."""
