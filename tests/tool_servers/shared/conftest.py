"""A simulated internet: all names and public addresses lead to a real server on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpcore
import pytest

from tool_servers.shared.fetch import Fetcher

PUBLIC = "93.184.215.14"
Handler = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Internet:
    """Resolver and dialler of a fetcher; connections to all addresses reach ``handler``."""

    def __init__(self):
        self.names = {}
        self.lookups = []
        self.dialled = []
        self.requests = []
        self.handler = None
        self._server = None

    async def start(self, host="127.0.0.1", **options):
        self._server = await asyncio.start_server(self._connected, host, 0, **options)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self):
        self._server.close()

    async def resolve(self, host, port):
        self.lookups.append(host)
        found = self.names.get(host, [PUBLIC])
        return found() if callable(found) else found

    async def dial(self, address, port, timeout_s):
        self.dialled.append((address, port))
        return await httpcore.AnyIOBackend().connect_tcp("127.0.0.1", self.port, timeout=timeout_s)

    async def _connected(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.requests.append(head)
                await (self.handler or page)(head, reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def answer(body=b"", *, status="200 OK", media_type="text/html", headers=()):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    if media_type:
        lines.append(f"Content-Type: {media_type}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def page(head, reader, writer):
    writer.write(answer(b"<p>reached</p>"))


@pytest.fixture
def answering():
    return answer


@pytest.fixture
async def internet():
    net = Internet()
    await net.start()
    yield net
    await net.stop()


@pytest.fixture
async def fetching(internet):
    """Open fetchers of this internet, and close them at the end."""
    fetchers = []

    def of(*policy, **options):
        own = {"resolve": internet.resolve, "dial": internet.dial} | options
        fetchers.append(Fetcher(*policy, **own))
        return fetchers[-1]

    yield of
    for fetcher in fetchers:
        await fetcher.close()
