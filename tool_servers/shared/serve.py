"""Run an application until a signal arrives: its socket, its connections and its log file."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from afm.processes import follow_parent
from tool_servers.shared.command import LOG_VARIABLE, Address, is_loopback

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


_PLACE = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(?::[0-9]{1,5})?\Z")
_JSON = re.compile(r"application/(?:[a-z0-9.-]+\+)?json\Z")
_KEPT = 3
_LOOK_S = 1.0


def follow_log() -> None:
    """Rotate the log file that :data:`LOG_VARIABLE` names, if it is set, whenever it exceeds its size."""
    log = os.environ.pop(LOG_VARIABLE, None)
    if log is None:
        return
    most, _, path = log.partition(":")
    threading.Thread(target=_followed, args=(Path(path), int(most)), name="log", daemon=True).start()


def _followed(path: Path, max_bytes: int) -> None:
    while True:
        time.sleep(_LOOK_S)
        if os.fstat(1).st_size > max_bytes:
            _renew(path)


def _renew(path: Path) -> None:
    """Rename the old files to ``path.1`` (the newest), ``path.2`` and so on, and continue in a new file."""
    files = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, _KEPT + 1))]
    try:
        for younger, older in reversed([*pairwise(files)]):
            with suppress(FileNotFoundError):
                younger.replace(older)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        print(f"log {path}: cannot be rotated: {error}", file=sys.stderr)
        return
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


_OTHER_FILES = 256
"""Descriptors reserved for files and for connections that are not those of clients."""


class BoundedProtocol(H11Protocol):
    """One connection. When there are too many, the one that has been idle longest is closed.

    Idle connections therefore block no others. A new connection gets status 503 only when all others have a running
    request.

    Attributes:
        head_s: Seconds from the connection, or from the first byte of a further request, to the end of the request's head.
        most: Largest number of connections.
    """

    head_s: float
    most: int
    _head: asyncio.TimerHandle | None = None
    _quiet_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first head, and make room if there are too many connections."""
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > self.most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on, and start or stop the timer for the head."""
        super().data_received(data)
        if self.transport.is_closing() or not self.is_quiet():
            self._head_is_here()
        elif self._head is None:
            self._await_head()

    def on_response_complete(self) -> None:
        """Note when the connection became idle."""
        self._quiet_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP."""
        self._refuse(400, msg.rstrip("."))

    def is_quiet(self) -> bool:
        """Return whether no request is running; further bytes then belong to a head or to a body that is not read."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        quiet = [
            other
            for other in self.connections
            if isinstance(other, BoundedProtocol) and other is not self and other.is_quiet()
        ]
        if not quiet:
            self._refuse(503, "too many connections")
            return
        oldest = min(quiet, key=lambda other: other._quiet_since)
        oldest.transport.abort()
        self.connections.discard(oldest)  # at once, so that the next count is right

    def _await_head(self) -> None:
        self._quiet_since = self.loop.time()
        self._head = self.loop.call_later(self.head_s, self._too_slow)

    def _head_is_here(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _too_slow(self) -> None:
        self._refuse(408, f"the head of the request did not arrive within {self.head_s:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answer without the application, and close the connection."""
        if self.transport.is_closing():
            return
        body = json.dumps({"error": message}).encode()
        head = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        self.transport.close()


def bounded(head_s: float, most: int) -> type[BoundedProtocol]:
    """Return a connection class with these limits; fewer connections if the process may open fewer files."""
    files, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _OTHER_FILES
    if files != resource.RLIM_INFINITY and files < wanted:
        files = wanted if highest == resource.RLIM_INFINITY else min(wanted, highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, highest))
        most = max(16, files - _OTHER_FILES)
    return type("Connection", (BoundedProtocol,), {"head_s": head_s, "most": most})


class BrowserGuard:
    """Keeps web pages in a browser on this machine from using a server that is meant for programs on this machine.

    A page may post to any address if the body looks like a form or plain text (cross-site request forgery). Posted
    bodies must therefore be JSON. The owner of a page's domain may also resolve its name to 127.0.0.1 (DNS rebinding).
    The browser then sends JSON, but under that name. Without a token, ``Host`` and ``Origin``, if present, must therefore
    name this machine. With a token, which no page knows, the server answers under any name, such as that of a proxy.

    | status | reason |
    |---|---|
    | 403 | ``Origin`` names another site |
    | 415 | the posted body is not JSON |
    | 421 | ``Host`` names another machine |

    Args:
        token: Token that requests must carry; ``None`` admits everyone.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it without reading its body."""
        refusal = self._refusal(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, message = refusal
        body = {"error": message, "kind": "request"}
        await JSONResponse(body, status, {"Connection": "close"})(scope, receive, send)

    def _refusal(self, method: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        if self._token is None:
            host, origin = headers.get("host", ""), headers.get("origin")
            advice = "a server without a token only serves this machine: set its token, or use 127.0.0.1"
            if not _is_this_machine(host):
                return 421, f"Host: got {host[:80]!r}, expected 127.0.0.1 or localhost; {advice}"
            if origin is not None and not _is_this_machine(re.sub(r"\Ahttps?://", "", origin)):
                return 403, f"Origin: got {origin[:80]!r}, expected none or http://localhost; {advice}"
        kind = headers.get("content-type", "")
        if method == "POST" and not _JSON.match(kind.partition(";")[0].strip().lower()):
            return 415, f"Content-Type: got {kind[:80]!r}, expected application/json"
        return None


def _is_this_machine(place: str) -> bool:
    """Return whether a host, with or without a port, is a loopback address or ``localhost``."""
    match = _PLACE.match(place.lower())
    return match is not None and is_loopback(match[1].strip("[]"))


@dataclass(frozen=True, slots=True)
class ServedApp:
    """An application and the settings of its server.

    Attributes:
        token: Token that requests must carry; without one, :class:`BrowserGuard` checks names.
        finish_s: Seconds that running requests get to finish when the server stops.
        prepare: Runs before the first request, in the same event loop; an error ends the server.
        held: Context entered before the server listens and left at the end.
        head_s: Seconds for the head of a request, from the connection on; then status 408.
        most_connections: Largest number of connections; beyond it, the one that has been idle longest is closed.
    """

    app: ASGIApp
    token: str | None
    finish_s: float
    prepare: Callable[[], Awaitable[None]] | None = None
    held: AbstractContextManager[Any] = field(default_factory=nullcontext)
    head_s: float = 15.0
    most_connections: int = 4096

    def config(self) -> uvicorn.Config:
        """Return the configuration of uvicorn. The log contains nothing from requests."""
        return uvicorn.Config(
            BrowserGuard(self.app, self.token),
            http=bounded(self.head_s, self.most_connections),
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(self.finish_s)),
            timeout_keep_alive=75,
        )


def serve(served: ServedApp, address: Address) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish running requests and return.

    Prints one line with the address to standard output.

    Raises:
        ConfigError: The server cannot listen at the address.
    """
    follow_parent()
    follow_log()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    config = served.config()
    name = f"[{address.host}]" if ":" in address.host else address.host

    async def run(listener: socket.socket) -> None:
        if served.prepare is not None:
            await served.prepare()
        server = uvicorn.Server(config)
        # uvicorn handles these signals while it serves and raises them again when it is done. Its handler is set here
        # already, because a signal that arrives before it serves must end it too.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.handle_exit)
        print(f"listening on http://{name}:{listener.getsockname()[1]}", flush=True)
        await server.serve(sockets=[listener])

    with served.held, address.listen() as listener:
        asyncio.run(run(listener))
