"""Connections to checked addresses: a name is resolved once, and only the addresses that were checked are dialled.

Bytes are metered for the fetch that reads them (:class:`FetchMeter`).
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
"""Returns the addresses of a name, best first; raises ``OSError`` if the name has no address."""

Dial = Callable[[str, int, float | None], Awaitable[httpcore.AsyncNetworkStream]]
"""Connects to an IP address and port within a number of seconds."""

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
    """Bounds the work of one fetch, including redirects; a limit on its bytes does not.

    Each read and each chunk of a body takes about the same time, whether it has one byte or 64 KiB. So does each interim
    answer (``100 Continue``) and each line of a head. Reads and chunks count as steps. A fetch may take 5,000 steps, and
    one more for every 512 bytes. All heads together may have 64 KiB.

    Args:
        max_bytes: Largest body; twice as many bytes may be received.

    Attributes:
        in_head: Whether a head is being read.
    """

    def __init__(self, max_bytes: int) -> None:
        self._most_bytes = 2 * max_bytes + _HEAD_BYTES
        self._bytes = self._head_bytes = self._steps = 0
        self.in_head = True

    async def step(self) -> None:
        """Count a step; now and then let other fetches run.

        Raises:
            httpcore.RemoteProtocolError: The fetch takes too many steps.
        """
        self._steps += 1
        if self._steps > _FREE_STEPS + self._bytes // _BYTES_A_STEP:
            raise httpcore.RemoteProtocolError(f"it comes in {self._steps} pieces for {self._bytes} bytes")
        if self._steps % _STEPS_A_TURN == 0:
            await asyncio.sleep(0)

    async def read(self, size: int) -> None:
        """Count bytes from the network.

        Raises:
            httpcore.RemoteProtocolError: The fetch received too many.
        """
        self._bytes += size
        self._head_bytes += size if self.in_head else 0
        if self._head_bytes > _HEAD_BYTES:
            raise httpcore.RemoteProtocolError(f"its head is longer than {_HEAD_BYTES} bytes")
        if self._bytes > self._most_bytes:
            raise httpcore.RemoteProtocolError(f"it takes more than {self._most_bytes} bytes to send")
        await self.step()


metering: ContextVar[FetchMeter] = ContextVar("metering")
"""The meter of this task's fetch. A connection cannot hold it, because later fetches use the connection again."""


class _Metered(httpcore.AsyncNetworkStream):
    """A connection whose reads are counted; heads are read in small pieces."""

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
    """Look up the addresses of ``host`` with the operating system; a slow name server delays only other look-ups."""
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    entries = await asyncio.get_running_loop().run_in_executor(_NAME_SERVER_THREADS, look_up)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


async def dial(address: str, port: int, timeout_s: float | None) -> httpcore.AsyncNetworkStream:
    """Connect over TCP."""
    return await httpcore.AnyIOBackend().connect_tcp(address, port, timeout=timeout_s)


def _leads_here(stream: httpcore.AsyncNetworkStream) -> bool:
    """Return whether the peer has an address of this machine other than a loopback address."""
    own, other = stream.get_extra_info("client_addr"), stream.get_extra_info("server_addr")
    return bool(own and other and own[0] == other[0] and not ip_address(other[0]).is_loopback)


class GuardedNetwork(httpcore.AsyncNetworkBackend):
    """Opens connections for a connection pool. TLS checks the name; the socket connects to the checked address."""

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
        """Resolve ``host``, check all its addresses and connect to the first that answers.

        Raises:
            BlockedError: An address is not public, or is a public address of this machine.
            httpcore.ConnectError: No address answers, or the name has no address.
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
        """Return the addresses of ``host`` after checking all of them.

        Raises:
            BlockedError: An address is not public.
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
        """Refuse."""
        raise BlockedError("sockets of this machine are not fetched")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)
