"""Tools of any MCP server (Model Context Protocol) as an agent's tools.

In a tools YAML, one entry a tool; entries with the same server share one connection::

    - class_name: afm.tools.mcp.McpTool
      config: {command: [uvx, mcp-server-time], tool: get_current_time, argument: timezone}
      tool_schema: {type: function, function: {name: clock}}
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, model_validator

from afm.configuration import validated
from afm.errors import ConfigError, MissingExtraError
from afm.tools.base import ToolResult
from afm.tools.registry import ToolContext


class McpServer(BaseModel):
    """Where a server is: a program that speaks over its standard streams, or an address.

    Attributes:
        command: Program and arguments, started with the first call.
        environment: Names of environment variables that the program gets beside the usual ones.
        url: Of a Streamable HTTP endpoint, e.g. ``http://127.0.0.1:8000/mcp``.
        token_variable: Environment variable with the bearer token for ``url``.
        timeout_s: For one call, and for connecting.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    url: str | None = Field(default=None, pattern=r"^https?://")
    token_variable: str | None = None
    timeout_s: float = Field(default=60.0, gt=0)

    @model_validator(mode="after")
    def _one_way(self) -> McpServer:
        if bool(self.command) == bool(self.url):
            raise ValueError("either `command` (a list of words) or `url`")
        return self


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

    What the server reports as the tool's own error (a wrong argument) is an answer to the agent; a server that is
    down, slow or breaks the protocol is a failed tool, and is connected to anew by the next call.
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

    async def call(self, argument: str) -> ToolResult:
        """See :class:`afm.tools.base.Tool`."""
        arguments = self._arguments(argument)
        if isinstance(arguments, str):
            return ToolResult(arguments, meta={"error": True})
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                result = await self._connection.call(self._settings.tool or self._name, arguments)
        except TimeoutError:
            await self._connection.drop()
            text = f"The tool {self._name} gave no answer within {self._settings.timeout_s:g} s."
            return ToolResult(text, ok=False)
        except Exception as error:  # noqa: BLE001 - transports and servers fail in every way
            await self._connection.drop()
            return ToolResult(f"The tool {self._name} failed: {_reason(error)}", ok=False)
        return ToolResult(_text(result), meta={"error": bool(result.is_error)})

    async def close(self) -> None:
        """End the connection and the server's program."""
        await self._connection.drop()

    def _arguments(self, text: str) -> dict[str, Any] | str:
        """The call's arguments, or what is wrong with them."""
        if self._settings.argument is not None:
            return {self._settings.argument: text.strip()}
        try:
            found = json.loads(text)
        except ValueError as error:
            return f"The arguments are no JSON: {error}. Write one JSON object with the tool's parameters."
        if not isinstance(found, dict):
            return "The arguments are no JSON object. Write one JSON object with the tool's parameters."
        return found


class McpConnection:
    """A connection to one server, made by the first call and shared by all its tools.

    Each event loop has its own.
    """

    def __init__(self, server: McpServer) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise MissingExtraError("mcp", "servers") from None
        self._server = server
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, _Session] = WeakKeyDictionary()

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """The server's result of one call.

        Raises:
            Exception: Whatever the transport or the protocol raises.
        """
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            session = self._sessions[loop] = _Session(self._server)
        client = await session.client()
        return await client.call_tool(tool, arguments)

    async def drop(self) -> None:
        """End this event loop's session; the next call makes a new one."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()


class _Session:
    """Holds a client open in a task of its own: it must be left by the task that entered it."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._closing = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    async def client(self) -> Any:
        return await asyncio.shield(self._client)

    async def close(self) -> None:
        self._closing.set()
        await asyncio.wait([self._task], timeout=10.0)
        self._task.cancel()

    async def _hold(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await _client(self._server, stack))
                self._client.set_result(client)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - told to the callers that wait for the client
            if not self._client.done():
                self._client.set_exception(error)
                self._client.exception()  # nobody may be waiting any more


async def _client(server: McpServer, stack: AsyncExitStack) -> Any:
    from mcp import Client, StdioServerParameters
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    if server.url is None:
        missing = [name for name in server.environment if name not in os.environ]
        if missing:
            raise ConfigError(f"environment variables of the MCP server are not set: {', '.join(missing)}")
        given = {name: os.environ[name] for name in server.environment}
        program, *words = server.command
        return Client(StdioServerParameters(command=program, args=words, env=given))
    headers = {}
    if server.token_variable is not None:
        token = os.environ.get(server.token_variable)
        if not token:
            raise ConfigError(
                f"environment variable {server.token_variable} is not set; it holds the token for {server.url}"
            )
        headers["Authorization"] = f"Bearer {token}"
    http = await stack.enter_async_context(create_mcp_http_client(headers=headers))
    return Client(streamable_http_client(server.url, http_client=http))


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
