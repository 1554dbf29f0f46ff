"""Connections of a server: the head of a request must come in time, and there are only so many at once."""

from __future__ import annotations

import asyncio
import json
import resource
from http import HTTPStatus

from uvicorn.protocols.http.h11_impl import H11Protocol

_OTHER_FILES = 256
"""Descriptors kept for what is no connection of a client."""


class BoundedProtocol(H11Protocol):
    """One connection. When there are too many, the one that has longest been without a request makes room.

    So connections that ask nothing keep nobody out; only when all of them have requests at work is a new one refused (503).

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
        """Whether no request is at work; what comes now is a head, or a body that nobody reads any more."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        quiet = [
            one
            for one in self.connections
            if isinstance(one, BoundedProtocol) and one is not self and one.is_quiet()
        ]
        if not quiet:
            self._refuse(503, "too many connections")
            return
        oldest = min(quiet, key=lambda one: one._quiet_since)
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
    """Connections with these limits; fewer where the system does not let this process have so many open files."""
    files, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _OTHER_FILES
    if files != resource.RLIM_INFINITY and files < wanted:
        files = wanted if highest == resource.RLIM_INFINITY else min(wanted, highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, highest))
        most = max(16, files - _OTHER_FILES)
    return type("Connection", (BoundedProtocol,), {"head_s": head_s, "most": most})
