"""The tools of a tools YAML as an MCP server, and the gate before it over HTTP: token, limits, numbers.

| request | answer |
|---|---|
| ``POST /mcp`` | MCP |
| ``GET /health`` | 200; needs no token |
| ``GET /metrics`` | numbers for Prometheus |

Every other status is ``{"error": "..."}``: 401 no token, 404 no such path, 405 (there are no sessions, hence no stream to
wait on and nothing to delete), 408 the body came too slowly, 413 too large, 429 busy (with ``Retry-After``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp.server import Server
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from afm import __version__
from afm.configuration import read_mapping, validated
from afm.errors import AfmError
from afm.tools import Tool, load_tools
from afm.tools.registry import FunctionSchema, ToolsFile
from tool_servers.shared.access import allowed
from tool_servers.shared.admission import Admission, BusyError
from tool_servers.shared.metrics import CONTENT_TYPE, Count, Durations, Gauge, page
from tool_servers.shared.requests import GoneError, TooLargeError, bounded_body
from tool_servers.shared.settings import ServerSettings

MCP_PATH = "/mcp"
_BODY_S = 15.0
_MAX_REQUEST_BYTES = 4 << 20
_GONE = 499  # nobody reads it
_BOUNDS_S = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Gate:
    """Lets requests through to ``app``.

    Args:
        token: What requests must carry; ``None`` lets everyone in.
    """

    def __init__(self, app: ASGIApp, limits: ServerSettings, *, token: str | None) -> None:
        self._app, self._token = app, token
        self._admission = Admission(limits.max_parallel, limits.max_waiting, limits.max_wait_s)
        self._answered = Count("afm_mcp_requests_total", "Requests, by status.", "status", ("200", "429"))
        self._seconds = Durations(
            "afm_mcp_request_seconds", "Time of a request that was let through, waiting included.", _BOUNDS_S
        )
        self._metrics = (
            self._answered,
            self._seconds,
            Gauge("afm_mcp_running", "Requests at work now.", lambda: self._admission.running),
            Gauge("afm_mcp_waiting", "Requests waiting now.", lambda: self._admission.waiting),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        response = self._own(request)
        if response is None:
            response = await self._let_through(request, send)
        if response is not None:
            await response(scope, receive, send)

    async def _let_through(self, request: Request, send: Send) -> Response | None:
        """A refusal, unless the application has answered."""
        began = time.monotonic()
        try:
            body = await bounded_body(request, _MAX_REQUEST_BYTES, _BODY_S)
        except TooLargeError as error:
            return self._refusal(413, str(error), {"Connection": "close"})
        except TimeoutError:
            message = f"the request did not arrive within {_BODY_S:g} s"
            return self._refusal(408, message, {"Connection": "close"})
        except GoneError:
            return self._refusal(_GONE, "the client has left")
        try:
            async with self._admission.place():
                await self._app(request.scope, _received(body, request.receive), self._counting(send))
        except BusyError as error:
            return self._refusal(429, str(error), {"Retry-After": str(error.retry_after_s)})
        self._seconds.add(time.monotonic() - began)
        return None

    def _own(self, request: Request) -> Response | None:
        """The answer to what is no business of the application."""
        path = request.url.path
        if path == "/health":
            state = {"running": self._admission.running, "waiting": self._admission.waiting}
            return JSONResponse({"status": "ok", **state})
        if not allowed(request.headers, self._token):
            return self._refusal(401, "the token is missing or wrong", {"WWW-Authenticate": "Bearer"})
        if path == "/metrics":
            return PlainTextResponse(page(self._metrics), media_type=CONTENT_TYPE)
        if path != MCP_PATH:
            return self._refusal(404, f"no such path; expected {MCP_PATH}")
        if request.method != "POST":
            return self._refusal(405, "expected POST", {"Allow": "POST"})
        return None

    def _refusal(self, status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
        self._answered.add(str(status))
        return JSONResponse({"error": message}, status, headers)

    def _counting(self, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered.add(str(message["status"]))
            await send(message)

        return counted


def _received(body: bytes, receive: Receive) -> Receive:
    """The body that has been read, then whatever comes."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


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
    """``server`` behind Streamable HTTP at ``/mcp``, without sessions, behind :class:`Gate`.

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
