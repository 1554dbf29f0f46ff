"""``python -m tool_servers.mcp --tools YAML [--http] [--host H] [--port N]``: offer our tools to MCP clients."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from afm.errors import AfmError, MissingExtraError
from afm.settings import load_settings
from afm.tools import Tool
from tool_servers.shared.access import check_exposure
from tool_servers.shared.serve import serve

_TOKEN = "MCP_SERVER_TOKEN"
_FINISH_S = 30.0


def main() -> int:
    """Serve until the client leaves or told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m tool_servers.mcp",
        description=f"Offer tools to MCP clients, on standard streams or HTTP. The token comes from {_TOKEN}.",
    )
    parser.add_argument(
        "--tools", type=Path, required=True, help="YAML, e.g. configs/tools/code_executor.yaml"
    )
    parser.add_argument(
        "--http", action="store_true", help="listen on HOST:PORT/mcp instead of standard input"
    )
    parser.add_argument("--host", help="address to listen on (SERVER_HOST; 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port, 0 for a free one (MCP_SERVER_PORT; 9004)")
    given = parser.parse_args()
    try:
        if find_spec("mcp") is None:
            raise MissingExtraError("mcp", "servers")
        if given.http:
            _serve_http(given.tools, given.host, given.port)
        else:
            asyncio.run(_serve_streams(given.tools))
    except AfmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _serve_http(tools_file: Path, host: str | None, port: int | None) -> None:
    from tool_servers.mcp.app import http_app, mcp_server

    environment = load_settings()
    secret = environment.mcp_server_token
    token = secret.get_secret_value() if secret else None
    host = host or environment.server_host
    check_exposure(host, token, _TOKEN)
    server, tools = mcp_server(tools_file)
    try:
        app = http_app(server, host=host, token=token)
        serve(app, host, environment.mcp_server_port if port is None else port, finish_s=_FINISH_S)
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
