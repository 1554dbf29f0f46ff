"""A tool whose answers are known by heart."""

from __future__ import annotations

from collections.abc import Callable

from afm.tools import ToolResult


class KnownTool:
    """Answers each argument as ``reply`` says, and remembers the arguments."""

    def __init__(self, name: str, reply: Callable[[str], str]) -> None:
        self.name = name
        self.arguments: list[str] = []
        self._reply = reply

    async def call(self, argument: str) -> ToolResult:
        self.arguments.append(argument)
        return ToolResult(self._reply(argument))

    async def close(self) -> None:
        pass
