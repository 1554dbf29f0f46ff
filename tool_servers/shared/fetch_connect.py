"""Connections to addresses that were judged: a name is resolved once, and what was judged is what is dialled.

What comes over them is metered for the fetch that reads it (:class:`FetchMeter`).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from ipaddress import ip_address
from typing import Any

import httpcore

from tool_servers.shared.url_guard import BlockedError, Policy, check_address

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Addresses of a name, best first; raises ``OSError`` when the name has no address."""

Dial = Callable[[str, int, float | None], Awaitable[httpcore.AsyncNetworkStream]]
"""A connection to an IP address and port within a number of seconds."""

SocketOptions = Iterable[
    tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]
]

_MAX_TRIED = 4
_NAME_SERVER_THREADS = ThreadPoolExecutor(32, thread_name_prefix="resolve")
_HEAD_BYTES = 64 << 10
_HEAD_READ_BYTES = 1 << 10
_FREE_STEPS = 5_000
_BYTES_A_STEP = 512
_STEPS_A_TURN = 32


class UnresolvedError(httpcore.ConnectError):
    """The name has no address."""


class FetchMeter:
    """Bounds the work of one fetch, redirects included, which its bytes alone do not.

    Each read and each chunk of a body costs about the same time whether it brings one byte or 64 KiB, and so does each
    interim answer (``100 Continue``) and each line of a head. Reads and chunks are steps: 5,000, and one more for every 512
    bytes. Heads are bounded by their bytes, 64 KiB together.

    Args:
        max_bytes: Of the body; on the wire there may be twice as many.

    Attributes:
        in_head: Whether a head is being read.
    """

    def __init__(self, max_bytes: int) -> None:
        self._most_bytes = 2 * max_bytes + _HEAD_BYTES
        self._bytes = self._head_bytes = self._steps = 0
        self.in_head = True

    async def step(self) -> None:
        """Count one; other fetches take their turn in between.

        Raises:
            httpcore.RemoteProtocolError: There were too many.
        """
        self._steps += 1
        if self._steps > _FREE_STEPS + self._bytes // _BYTES_A_STEP:
            raise httpcore.RemoteProtocolError(f"it comes in {self._steps} pieces for {self._bytes} bytes")
        if self._steps % _STEPS_A_TURN == 0:
            await asyncio.sleep(0)

    async def read(self, size: int) -> None:
        """Count what came from the network.

        Raises:
            httpcore.RemoteProtocolError: It is too much.
        """
        self._bytes += size
        self._head_bytes += size if self.in_head else 0
        if self._head_bytes > _HEAD_BYTES:
            raise httpcore.RemoteProtocolError(f"its head is longer than {_HEAD_BYTES} bytes")
        if self._bytes > self._most_bytes:
            raise httpcore.RemoteProtocolError(f"it takes more than {self._most_bytes} bytes to send")
        await self.step()


metering: ContextVar[FetchMeter] = ContextVar("metering")
"""Of the fetch that this task makes; connections outlive a fetch and are read by others."""


class _Metered(httpcore.AsyncNetworkStream):
    """A connection whose reads are counted; of a head only a little is read at once."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - the pool's interface
        meter = metering.get()
        data = await self._stream.read(
            min(max_bytes, _HEAD_READ_BYTES) if meter.in_head else max_bytes, timeout
        )
        await meter.read(len(data))
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the pool's interface
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the pool's interface
    ) -> httpcore.AsyncNetworkStream:
        return _Metered(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


async def resolve(host: str, port: int) -> Sequence[str]:
    """Addresses of ``host``, each once, by the operating system; a slow name server holds up other names only."""
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    entries = await asyncio.get_running_loop().run_in_executor(_NAME_SERVER_THREADS, look_up)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


async def dial(address: str, port: int, timeout_s: float | None) -> httpcore.AsyncNetworkStream:
    """Connect."""
    return await httpcore.AnyIOBackend().connect_tcp(address, port, timeout=timeout_s)


def _leads_here(stream: httpcore.AsyncNetworkStream) -> bool:
    """Whether the other end has an address of this machine that is not the loopback's."""
    own, other = stream.get_extra_info("client_addr"), stream.get_extra_info("server_addr")
    return bool(own and other and own[0] == other[0] and not ip_address(other[0]).is_loopback)


class GuardedNetwork(httpcore.AsyncNetworkBackend):
    """Opens connections for a connection pool. TLS keeps the name; the socket goes to the judged address."""

    def __init__(self, policy: Policy, resolve: Resolve, dial: Dial) -> None:
        self._policy = policy
        self._resolve = resolve
        self._dial = dial

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the pool's interface
        local_address: str | None = None,
        socket_options: SocketOptions | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve, judge every address, connect to the first that answers.

        Raises:
            BlockedError: One of the addresses is not public, or is a public one of this very machine.
            httpcore.ConnectError: None answers, or the name has no address.
        """
        loop = asyncio.get_running_loop()
        until = None if timeout is None else loop.time() + timeout
        addresses = await self.judged(host, port, timeout)
        trouble: Exception = httpcore.ConnectError("no address answers")
        for place, address in enumerate(addresses):
            left = None if until is None else max(0.1, (until - loop.time()) / (len(addresses) - place))
            try:
                stream = await self._dial(address, port, left)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                trouble = error
                continue
            if _leads_here(stream) and not self._policy.trusts_pair(host, port):
                await stream.aclose()
                raise BlockedError(f"{address} is this machine; only public web pages are fetched")
            return _Metered(stream)
        raise trouble

    async def judged(self, host: str, port: int, timeout_s: float | None = None) -> Sequence[str]:
        """The addresses of ``host``, all of them fit to be fetched.

        Raises:
            BlockedError: One of them is not.
            UnresolvedError: The name has no address, or the name server was too slow.
        """
        addresses = await self._addresses(host, port, timeout_s)
        if not self._policy.trusts_pair(host, port):
            for address in addresses:
                check_address(ip_address(address))
        return addresses[:_MAX_TRIED]

    async def _addresses(self, host: str, port: int, timeout_s: float | None) -> Sequence[str]:
        try:
            return [str(ip_address(host))]
        except ValueError:
            pass
        try:
            async with asyncio.timeout(timeout_s):
                addresses = await self._resolve(host, port)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise UnresolvedError(f"the name {host!r} cannot be resolved") from error
        if not addresses:
            raise UnresolvedError(f"the name {host!r} has no address")
        return addresses

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - the pool's interface
        socket_options: SocketOptions | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Never."""
        raise BlockedError("sockets of this machine are not fetched")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)
