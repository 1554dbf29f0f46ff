"""``python -m tool_servers.mcp --tools YAML [--http] [--host H] [--port N]``: offer our tools to MCP clients."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from afm.tools import Tool
from tool_servers.shared.command import Given, Place, ServerCommand
from tool_servers.shared.serve import serve
from tool_servers.shared.settings import ServerSettings

_FINISH_S = 30.0


def main() -> int:
    """Serve until the client leaves or told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
    command = ServerCommand("mcp", "Offer tools to MCP clients, on standard streams or HTTP.", ("mcp",))
    command.parser.add_argument(
        "--tools", type=Path, required=True, help="YAML, e.g. configs/tools/code_executor.yaml"
    )
    command.parser.add_argument(
        "--http",
        action="store_true",
        help="listen on HOST:PORT/mcp instead of standard input; --host and --port say so, too",
    )
    return command.run(_serve)


def _serve(given: Given) -> None:
    options = given.options
    if options.http or options.host is not None or options.port is not None:
        _serve_http(options.tools, given.place())
    else:
        asyncio.run(_serve_streams(options.tools))


def _serve_http(tools_file: Path, place: Place) -> None:
    from tool_servers.mcp.app import http_app, mcp_server

    server, tools = mcp_server(tools_file)
    try:
        limits = ServerSettings(finish_s=_FINISH_S)
        app = http_app(server, token=place.token, limits=limits)
        serve(app, place.host, place.port, token=place.token, finish_s=limits.finish_s)
    finally:
        asyncio.run(_closed(tools))


async def _serve_streams(tools_file: Path) -> None:
    from mcp.server.stdio import stdio_server

    from tool_servers.mcp.app import mcp_server

    server, tools = mcp_server(tools_file)
    try:
        async with stdio_server() as (received, sent):
            await server.run(received, sent, server.create_initialization_options())
    finally:
        await _closed(tools)


async def _closed(tools: Mapping[str, Tool]) -> None:
    await asyncio.gather(*(tool.close() for tool in tools.values()))


if __name__ == "__main__":
    sys.exit(main())
