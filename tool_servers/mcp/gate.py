"""What stands before the MCP application: token, limits, numbers.

| request | answer |
|---|---|
| ``POST /mcp`` | MCP |
| ``GET /health`` | 200; needs no token |
| ``GET /metrics`` | numbers for Prometheus |

Every other status is ``{"error": "..."}``: 401 no token, 404 no such path, 405 (there are no sessions, hence no stream to wait on and
nothing to delete), 408 the body came too slowly, 413 too large, 429 busy (with ``Retry-After``).
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tool_servers.shared.access import allowed
from tool_servers.shared.admission import Admission, BusyError
from tool_servers.shared.metrics import CONTENT_TYPE, Count, Durations, Level, page
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
            Level("afm_mcp_running", "Requests at work now.", lambda: self._admission.running),
            Level("afm_mcp_waiting", "Requests waiting now.", lambda: self._admission.waiting),
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
