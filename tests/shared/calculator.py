"""A tool that adds, without a sandbox: for tests that compare episodes and start many programs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from afm.tools import ToolResult
from afm.tools.base import ToolContext


class Calculator:
    """Says what ``print(A+B)`` prints."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> Calculator:
        return cls(context.schema.function.name)

    async def call(self, argument: str) -> ToolResult:
        match = re.search(r"print\((\d+)\+(\d+)\)", argument)
        return ToolResult(str(int(match[1]) + int(match[2])) if match else "no sum")

    async def close(self) -> None:
        pass
