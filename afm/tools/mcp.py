"""Tools of any MCP server (Model Context Protocol) as an agent's tools.

A tools YAML has one entry per tool. Entries with the same server share one connection::

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

from pydantic import Field, ValidationError, model_validator

from afm.configuration import Settings, validated
from afm.endpoints.connections import bearer
from afm.errors import ConfigError, MissingExtraError, without_password
from afm.processes import program_environment
from afm.tools.base import ToolContext, ToolResult

_START_S = 60.0
_CLOSE_S = 10.0


class McpServer(Settings):
    """An MCP server: a program that speaks over its standard streams, or an address."""

    command: tuple[str, ...] = ()
    """Program and arguments. The first call starts it."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that the program gets in addition to the usual ones."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """Address of a Streamable HTTP endpoint, such as ``http://127.0.0.1:8000/mcp``."""
    token_variable: str | None = None
    """Environment variable with the bearer token for ``url``."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one call in seconds."""
    max_bytes: int = Field(default=16 << 20, ge=1024)
    """Longest answer. A program that writes a longer line is ended. A longer HTTP answer or stream event fails its
    call."""
    connect_s: float | None = Field(default=None, gt=0)
    """Time limit for connecting in seconds. The default is ``timeout_s`` for an address and at least a minute for a
    program, which may have to be installed first."""

    @property
    def patience_s(self) -> float:
        """Longest wait for a connection in seconds."""
        if self.connect_s is not None:
            return self.connect_s
        return self.timeout_s if self.url else max(self.timeout_s, _START_S)

    @model_validator(mode="after")
    def _check_way(self) -> McpServer:
        if bool(self.command) == bool(self.url):
            raise ValueError("either `command` (a list of words) or `url`")
        return self


class McpConnection:
    """A connection to one server. Each event loop has its own session.

    Calls are independent: a call that takes too long is cancelled while the server answers others. If the whole server
    hangs or is gone, the next call opens a new session, and the old one ends with its last call.

    Raises:
        MissingExtraError: The package ``mcp`` is not installed.
    """

    def __init__(self, server: McpServer) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise MissingExtraError("mcp", "servers") from None
        self._server = server
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Session]] = WeakKeyDictionary()

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Return the server's result of one call.

        Raises:
            TimeoutError: The call took longer than ``timeout_s``, or connecting longer than ``connect_s``.
            Exception: The transport or the protocol failed.
        """
        session = self._session()
        await session.connected()
        answers = session.answers
        try:
            async with asyncio.timeout(self._server.timeout_s):
                return await session.call(tool, arguments)
        except TimeoutError:
            if session.answers == answers:  # the server has answered no call since this one began
                session.leave()
            raise
        except Exception as error:
            if not session.answered_by(error):
                session.leave()
            raise

    async def close(self) -> None:
        """End this event loop's sessions. Calls on them fail."""
        sessions = self._sessions.pop(asyncio.get_running_loop(), [])
        await asyncio.gather(*(session.close() for session in sessions))

    def _session(self) -> _Session:
        """Return the session for new calls. Sessions that take no new calls stay listed until they have ended."""
        sessions = self._sessions.setdefault(asyncio.get_running_loop(), [])
        sessions[:] = [session for session in sessions if not session.ended]
        if not sessions or sessions[-1].left:
            sessions.append(_Session(self._server))
        return sessions[-1]


class _Session:
    """Holds a client open in a separate task, because the task that enters a client must also leave it.

    Attributes:
        answers: Calls that the server has answered, including errors.
        left: Whether the session takes no new calls. It ends with its last call.
    """

    def __init__(self, server: McpServer) -> None:
        self.answers = 0
        self.left = False
        self._calls = 0
        self._server = server
        self._closing = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def connected(self) -> Any:
        return await asyncio.shield(self._client)

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        self._calls += 1
        try:
            client = await self.connected()
            result = await client.call_tool(tool, arguments)
        except Exception as error:
            self.answers += self.answered_by(error)
            raise
        finally:
            self._calls -= 1
            self._end_if_idle()
        self.answers += 1
        return result

    def answered_by(self, error: Exception) -> bool:
        """Return whether an error is the server's answer to one call and the session can take more."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST

        if not isinstance(error, MCPError):
            return isinstance(
                error, ValidationError | RuntimeError
            )  # the result is invalid or not as declared
        # A server behind an address also answers "invalid request" after it has forgotten the session.
        forgotten = error.code == INVALID_REQUEST and self._server.url is not None
        return error.code != CONNECTION_CLOSED and not forgotten

    def leave(self) -> None:
        """Take no new calls, and end with the last current one."""
        self.left = True
        self._end_if_idle()

    async def close(self) -> None:
        """End the session now."""
        self.left = True
        self._end()
        await asyncio.wait([self._task], timeout=_CLOSE_S)
        self._task.cancel()

    def _end_if_idle(self) -> None:
        if self.left and not self._calls:
            self._end()

    def _end(self) -> None:
        self._closing.set()
        if not self._client.done():  # it is still connecting and does not watch the event yet
            self._task.cancel()

    async def _hold(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._server.patience_s):
                    client = await stack.enter_async_context(await _client(self._server, stack))
                self._client.set_result(client)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - passed to the callers that wait for the client
            self._fail(error)
        finally:
            self._fail(ConnectionError("the connection was closed"))

    def _fail(self, error: Exception) -> None:
        if not self._client.done():
            self._client.set_exception(error)
            self._client.exception()  # no caller may be waiting to retrieve it


async def _client(server: McpServer, stack: AsyncExitStack) -> Any:
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    from afm.tools.mcp_transport import bounded_client, program

    if server.url is None:
        environment = program_environment(server.environment, "the MCP server")
        return Client(program(server.command, environment, server.max_bytes))
    headers = {}
    if server.token_variable is not None:
        token = os.environ.get(server.token_variable)
        if not token:
            raise ConfigError(
                f"environment variable {server.token_variable} is not set; it holds the token for {server.url}"
            )
        headers = bearer(token, server.token_variable)
    http = await stack.enter_async_context(bounded_client(headers, server.max_bytes))
    return Client(streamable_http_client(server.url, http_client=http, max_sse_event_size=server.max_bytes))


class McpSettings(McpServer):
    """One tool of a server."""

    tool: str | None = None
    """The server's name for the tool, by default the name in ``tool_schema``."""
    argument: str | None = None
    """The parameter that gets the text between the agent's tags. By default the text is a JSON object of all
    parameters."""


class McpTool:
    """A tool of an MCP server.

    An error that the server reports as the tool's own, such as an invalid argument, is an answer to the agent. A call that
    takes too long, or that the server cannot answer, is a failure of the tool. The next call reconnects to a server that
    hangs or is gone.
    """

    def __init__(self, name: str, settings: McpSettings, connection: McpConnection) -> None:
        self._name = name
        self._settings = settings
        self._connection = connection

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> McpTool:
        """See :class:`afm.tools.base.ConfiguredTool`.

        Raises:
            ConfigError: A setting is invalid.
            MissingExtraError: The package ``mcp`` is not installed.
        """
        settings = validated(McpSettings, dict(config), context.label, context.at)
        server = McpServer(**settings.model_dump(include=set(McpServer.model_fields)))
        connection = context.shared(server.model_dump(mode="json"), lambda: McpConnection(server))
        return cls(context.schema.function.name, settings, connection)

    @property
    def name(self) -> str:
        """The name that an agent's role refers to."""
        return self._name

    def variables(self) -> tuple[str, ...]:
        """Return the environment variables that the server gets. See :class:`afm.tools.base.TrustedTool`."""
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
        """Return the call's arguments, or a text that explains why they are invalid."""
        if self._settings.argument is not None:
            return {self._settings.argument: text.strip()}
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"The arguments are not JSON: {error}. Write one JSON object with the tool's parameters."
        if not isinstance(arguments, dict):
            return "The arguments are not a JSON object. Write one JSON object with the tool's parameters."
        return arguments


def _text(result: Any) -> str:
    """Return a result as text, with names in place of media."""
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
    """Return the text of an error, or of the first error in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return without_password(f"{type(error).__name__}: {error}")[:300]
