"""An MCP server for the tools of a tools YAML: on standard streams, or over HTTP at ``POST /mcp``.

Over HTTP there are no sessions, and so no ``GET`` stream and no ``DELETE``. For ``/health``, ``/metrics`` and errors,
see :mod:`tool_servers.shared.endpoint`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import mcp_types as types
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from afm import __version__
from afm.errors import AfmError, ConfigError
from afm.tools import Tool, load_tools
from afm.tools.registry import read_tools_file
from tool_servers.shared.command import Launch, NotSetUpError, ServerSettings
from tool_servers.shared.endpoint import Endpoint
from tool_servers.shared.serve import ServedApp

MCP_PATH = "/mcp"
_MAX_REQUEST_BYTES = 4 << 20
_LIMITS = ServerSettings(finish_s=30.0)


def mcp_server(source: Path | Mapping[str, Any]) -> tuple[Server[Any], dict[str, Tool]]:
    """Return an MCP server for the tools of ``source``, and the tools, which the caller closes.

    A tool whose schema has one parameter gets the text of that parameter; other tools get all arguments as a JSON object.
    The answer of a failed tool has ``is_error`` set.

    Raises:
        ConfigError: ``source`` is not a valid tools YAML.
    """
    tools = load_tools(source)
    functions = [entry.tool_schema.function for entry in read_tools_file(source).tools]
    by_name = {function.name: function for function in functions}

    async def list_tools(_: Any, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=function.name,
                    description=function.description or None,
                    input_schema={"type": "object", **function.parameters},
                )
                for function in functions
            ]
        )

    async def call_tool(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in tools:
            return _answer(f"no tool {params.name!r}; expected one of: {', '.join(tools)}", failed=True)
        try:
            argument = by_name[params.name].argument(params.arguments or {})
            result = await tools[params.name].call(argument)
        except (AfmError, ValueError) as error:
            return _answer(str(error), failed=True)
        return _answer(result.text, failed=not result.ok)

    server = Server("afm", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)
    return server, tools


def http_app(
    server: Server[Any], tools: Mapping[str, Tool], *, token: str | None, limits: ServerSettings
) -> Starlette:
    """Serve ``server`` over MCP's Streamable HTTP; close ``tools`` at the end.

    :class:`tool_servers.shared.serve.BrowserGuard` checks host names, as for all servers. The library's own check would
    refuse a server with a token behind a proxy.
    """
    manager = StreamableHTTPSessionManager(
        server,
        json_response=True,
        stateless=True,
        security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        max_request_body_size=_MAX_REQUEST_BYTES,
    )

    async def answer(request: tuple[Scope, bytes]) -> Response:
        scope, body = request
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if not pending:
                await asyncio.Event().wait()  # the endpoint notices when the client leaves
            return pending.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        await manager.handle_request(scope, receive, send)
        response = Response(b"".join(message.get("body", b"") for message in sent), sent[0]["status"])
        response.raw_headers = list(sent[0]["headers"])
        return response

    def parse(request: Request, body: bytes) -> tuple[Scope, bytes]:
        return request.scope, body

    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        try:
            async with manager.run():
                yield
        finally:
            await _close(tools)

    endpoint = Endpoint("mcp", limits, token=token, max_bytes=_MAX_REQUEST_BYTES)
    return endpoint.app(endpoint.post(MCP_PATH, parse, answer), life=life)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this server."""
    example = "configs/tools/code_executor.yaml"
    parser.add_argument("--tools", type=Path, help=f"tools YAML, e.g. {example}; required")
    parser.add_argument(
        "--http",
        action="store_true",
        help="listen on HOST:PORT/mcp instead of standard input; implied by --host and --port",
    )


def check(launch: Launch) -> None:
    """Check that the tools can be loaded.

    Raises:
        ConfigError: The file is missing or not a valid tools YAML.
    """
    load_tools(_tools_file(launch))


def serve_streams(launch: Launch) -> bool:
    """Serve on standard streams until the client leaves, if the command line asks for them; return whether it does."""
    options = launch.options
    if options.http or options.host is not None or options.port is not None:
        return False
    server, tools = mcp_server(_tools_file(launch))

    async def run() -> None:
        try:
            async with stdio_server() as (incoming, outgoing):
                await server.run(incoming, outgoing, server.create_initialization_options())
        finally:
            await _close(tools)

    asyncio.run(run())
    return True


def open_app(launch: Launch) -> ServedApp:
    """Open the application."""
    server, tools = mcp_server(_tools_file(launch))
    token = launch.address().token
    return ServedApp(http_app(server, tools, token=token, limits=_LIMITS), token, _LIMITS.finish_s)


def trial(client: httpx.Client) -> str:
    """Open an MCP session."""
    parameters = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "servers.sh", "version": "1"},
    }
    body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": parameters}
    response = client.post(MCP_PATH, json=body, headers={"Accept": "application/json, text/event-stream"})
    return f"speaks MCP {response.raise_for_status().json()['result']['protocolVersion']}"


async def _close(tools: Mapping[str, Tool]) -> None:
    await asyncio.gather(*(tool.close() for tool in tools.values()))


def _tools_file(launch: Launch) -> Path:
    path: Path | None = launch.options.tools
    if path is None:
        raise NotSetUpError(
            "--tools is missing; tool_servers/servers.sh start mcp -- --tools configs/tools/code_executor.yaml"
        )
    if not path.is_file():
        raise ConfigError(f"--tools: {path}: no such file")
    return path


def _answer(text: str, *, failed: bool) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)], is_error=failed)
