"""Running an application until a signal comes: the log file of its process, its connections, its socket."""

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
    """Keep the file that :data:`LOG_VARIABLE` names below its size; nothing to do without it."""
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
    """Number the old files, ``path.1`` being the youngest, and continue in a new one."""
    files = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, _KEPT + 1))]
    try:
        for younger, older in reversed([*pairwise(files)]):
            with suppress(FileNotFoundError):
                younger.replace(older)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        print(f"log {path}: cannot be renewed: {error}", file=sys.stderr)
        return
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


_OTHER_FILES = 256
"""Descriptors kept for what is no connection of a client."""


class BoundedProtocol(H11Protocol):
    """One connection. When there are too many, the one that has longest been without a request makes room.

    So idle connections block no others. Only when all of them have requests at work is a new one refused (503).

    Attributes:
        head_s: From the connection, or the first byte of a further request, to the end of the request's head.
        most: Connections at the same time.
    """

    head_s: float
    most: int
    _head: asyncio.TimerHandle | None = None
    _quiet_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > self.most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        super().data_received(data)
        if self.transport.is_closing() or not self.is_quiet():
            self._head_is_here()
        elif self._head is None:
            self._await_head()

    def on_response_complete(self) -> None:
        """A request was answered."""
        self._quiet_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self._refuse(400, msg.rstrip("."))

    def is_quiet(self) -> bool:
        """Whether no request is at work; what comes now is a head, or a body that is not read any more."""
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
        self.connections.discard(oldest)  # now, so that the next one counts right

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
        """Answer without the application, and close."""
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
    """Connections with these limits; fewer where the system allows this process fewer open files."""
    files, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _OTHER_FILES
    if files != resource.RLIM_INFINITY and files < wanted:
        files = wanted if highest == resource.RLIM_INFINITY else min(wanted, highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, highest))
        most = max(16, files - _OTHER_FILES)
    return type("Connection", (BoundedProtocol,), {"head_s": head_s, "most": most})


class BrowserGuard:
    """Keeps pages in a browser on this machine from using a server, which programs on this machine may use.

    A page may post to any address as long as the body looks like a form or plain text (cross-site request forgery), so
    posted bodies are JSON. The owner of a page's domain may resolve its name to 127.0.0.1 (DNS rebinding); the browser
    then sends JSON, too, but under that name. So without a token, ``Host`` and, where there is one, ``Origin`` must name
    this machine. With a token, which no page knows, a server answers under any name: a proxy before it has its own.

    | refusal | |
    |---|---|
    | 403 | ``Origin`` is another site |
    | 415 | a posted body that is not JSON |
    | 421 | ``Host`` is another name |

    Args:
        token: What the server asks of requests.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it unread."""
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
            advice = "a server without a token is for this machine: set its token, or ask for 127.0.0.1"
            if not _is_this_machine(host):
                return 421, f"Host: got {host[:80]!r}, expected 127.0.0.1 or localhost; {advice}"
            if origin is not None and not _is_this_machine(re.sub(r"\Ahttps?://", "", origin)):
                return 403, f"Origin: got {origin[:80]!r}, expected none or http://localhost; {advice}"
        kind = headers.get("content-type", "")
        if method == "POST" and not _JSON.match(kind.partition(";")[0].strip().lower()):
            return 415, f"Content-Type: got {kind[:80]!r}, expected application/json"
        return None


def _is_this_machine(place: str) -> bool:
    """Whether a host, with or without a port, is a loopback address or ``localhost``."""
    match = _PLACE.match(place.lower())
    return match is not None and is_loopback(match[1].strip("[]"))


@dataclass(frozen=True, slots=True)
class ServedApp:
    """An application with what its server needs to know.

    Attributes:
        token: What the application asks of requests; without one, pages in a browser are kept out by their names.
        finish_s: How long requests may continue when the server has to stop.
        prepare: Runs before the first request, in the same event loop; what it raises ends the server.
        held: Entered before it listens, left at the end.
        head_s: For the head of a request, from the connection on; then status 408.
        most_connections: Beyond them the one that has longest been without a request is closed.
    """

    app: ASGIApp
    token: str | None
    finish_s: float
    prepare: Callable[[], Awaitable[None]] | None = None
    held: AbstractContextManager[Any] = field(default_factory=nullcontext)
    head_s: float = 15.0
    most_connections: int = 4096

    def config(self) -> uvicorn.Config:
        """How its connections are served. Nothing that a request contains is logged."""
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
    """Listen until SIGTERM or Ctrl-C; then finish what is under way and return.

    One line on standard output says where it listens.

    Raises:
        ConfigError: The address cannot be listened on.
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
        # The server takes these signals itself while it serves, and sends them again when it is done. Its own handler is
        # set here already: a signal that comes before it serves must end it too.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.handle_exit)
        print(f"listening on http://{name}:{listener.getsockname()[1]}", flush=True)
        await server.serve(sockets=[listener])

    with served.held, address.listen() as listener:
        asyncio.run(run(listener))
