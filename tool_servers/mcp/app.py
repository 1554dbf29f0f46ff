"""The tools of a tools YAML as an MCP server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp.server import Server
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import ASGIApp

from afm import __version__
from afm.configuration import read_mapping, validated
from afm.errors import AfmError
from afm.tools import Tool, load_tools
from afm.tools.registry import FunctionSchema, ToolsFile
from tool_servers.mcp.gate import MCP_PATH, Gate
from tool_servers.shared.settings import ServerSettings


def mcp_server(source: Path | Mapping[str, Any]) -> tuple[Server[Any], dict[str, Tool]]:
    """An MCP server for the tools of ``source``, and those tools, for closing them.

    A tool whose schema has one parameter gets that parameter's text, any other its arguments as a JSON object. A
    tool that failed answers with ``is_error``.

    Raises:
        ConfigError: ``source`` is no valid tools YAML.
    """
    tools = load_tools(source)
    label, data = read_mapping(source, "tools")
    functions = [entry.tool_schema.function for entry in validated(ToolsFile, data, label).tools]
    offered = {function.name: function for function in functions}

    async def list_tools(_: Any, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_declared(function) for function in functions])

    async def call_tool(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in tools:
            return _answer(f"no tool {params.name!r}; expected one of: {', '.join(tools)}", failed=True)
        try:
            argument = offered[params.name].argument(params.arguments or {})
            result = await tools[params.name].call(argument)
        except (AfmError, ValueError) as error:
            return _answer(str(error), failed=True)
        return _answer(result.text, failed=not result.ok)

    server = Server("afm", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)
    return server, tools


def http_app(server: Server[Any], *, token: str | None, limits: ServerSettings) -> ASGIApp:
    """``server`` behind Streamable HTTP at ``/mcp``, without sessions; see :mod:`tool_servers.mcp.gate`.

    The check of names is :class:`tool_servers.shared.access.BrowserGuard`'s, as for all servers: the library's own would
    refuse a server with a token behind a proxy.
    """
    app = server.streamable_http_app(
        streamable_http_path=MCP_PATH,
        json_response=True,
        stateless_http=True,
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return Gate(app, limits, token=token)


def _declared(function: FunctionSchema) -> types.Tool:
    return types.Tool(
        name=function.name,
        description=function.description or None,
        input_schema={"type": "object", **function.parameters},
    )


def _answer(text: str, *, failed: bool) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)], is_error=failed)
