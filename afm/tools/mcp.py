"""Tools of any MCP server (Model Context Protocol) as an agent's tools.

In a tools YAML, one entry a tool; entries with the same server share one connection::

    - class_name: afm.tools.mcp.McpTool
      config: {command: [uvx, mcp-server-time], tool: get_current_time, argument: timezone}
      tool_schema: {type: function, function: {name: clock}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from afm.configuration import validated
from afm.tools.base import ToolResult
from afm.tools.mcp_connection import McpConnection, McpServer
from afm.tools.registry import ToolContext


class McpSettings(McpServer):
    """One tool of a server.

    Attributes:
        tool: What the server calls it; default: the name in ``tool_schema``.
        argument: Parameter that gets the text between the agent's tags; by default that text is a JSON object of
            all parameters.
    """

    tool: str | None = None
    argument: str | None = None


class McpTool:
    """A tool of an MCP server.

    What the server reports as the tool's own error (a wrong argument) is an answer to the agent. A call that takes too
    long, or that the server cannot answer, is a failed tool. A server that hangs or is gone is connected to anew by the
    next call; see :class:`afm.tools.mcp_connection.McpConnection`.
    """

    def __init__(self, name: str, settings: McpSettings, connection: McpConnection) -> None:
        self._name = name
        self._settings = settings
        self._connection = connection

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> McpTool:
        """See :class:`afm.tools.registry.ConfiguredTool`.

        Raises:
            ConfigError: Wrong settings.
            MissingExtraError: The package ``mcp`` is absent.
        """
        settings = validated(McpSettings, dict(config), context.label, context.at)
        server = McpServer(**settings.model_dump(include=set(McpServer.model_fields)))
        connection = context.shared(server.model_dump(mode="json"), lambda: McpConnection(server))
        return cls(context.schema.function.name, settings, connection)

    @property
    def name(self) -> str:
        """The name an agent's role refers to."""
        return self._name

    def variables(self) -> tuple[str, ...]:
        """What its server is told of the environment; see :class:`afm.tools.base.TrustedTool`."""
        token = self._settings.token_variable
        return (*self._settings.environment, *([token] if token else []))

    async def call(self, argument: str) -> ToolResult:
        """See :class:`afm.tools.base.Tool`."""
        arguments = self._arguments(argument)
        if isinstance(arguments, str):
            return ToolResult(arguments, meta={"error": True})
        try:
            result = await self._connection.call(self._settings.tool or self._name, arguments)
        except TimeoutError:
            text = f"The tool {self._name} gave no answer within {self._settings.timeout_s:g} s."
            return ToolResult(text, ok=False)
        except Exception as error:  # noqa: BLE001 - transports and servers fail in every way
            return ToolResult(f"The tool {self._name} failed: {_reason(error)}", ok=False)
        return ToolResult(_text(result), meta={"error": bool(result.is_error)})

    async def close(self) -> None:
        """End the connection and the server's program, for all tools of that server."""
        await self._connection.close()

    def _arguments(self, text: str) -> dict[str, Any] | str:
        """The call's arguments, or what is wrong with them."""
        if self._settings.argument is not None:
            return {self._settings.argument: text.strip()}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"The arguments are no JSON: {error}. Write one JSON object with the tool's parameters."
        if not isinstance(found, dict):
            return "The arguments are no JSON object. Write one JSON object with the tool's parameters."
        return found


def _text(result: Any) -> str:
    """A result in words; media are named, not shown."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and hasattr(block.resource, "text"):
            parts.append(block.resource.text)
        else:
            parts.append(f"[{block.type} {getattr(block, 'mime_type', None) or ''}".rstrip() + "]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    """The first leaf of an exception group, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:300]
