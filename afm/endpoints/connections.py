"""HTTP connections for many requests at a time, with a checked address and a key that appears in headers only.

httpx looks at every connection of a client before and after each request. A request of one client with 64 connections
therefore takes several times as long as one of a client with eight (``benchmarks/bench_eval.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from afm.errors import ConfigError

_CONNECTIONS_PER_CLIENT = 8
_LAST_PORT = 65_535


class HttpClients:
    """Clients with a few connections each; a request takes the least busy one.

    Args:
        connections: Kept open between requests, all clients together.
        bounded: Whether this is also the maximum. A request beyond it then waits in its client.
        options: Of each ``httpx.AsyncClient``.
    """

    def __init__(self, connections: int, *, bounded: bool = True, **options: Any) -> None:
        # Equal shares: the least busy client then always has room while fewer than `connections` requests are in flight.
        number = -(-connections // _CONNECTIONS_PER_CLIENT)
        shares = [(connections + number - 1 - place) // number for place in range(number)]
        certificates = httpx.create_ssl_context(trust_env=options.get("trust_env", True))
        self._clients = [
            httpx.AsyncClient(
                limits=httpx.Limits(
                    max_connections=share if bounded else None, max_keepalive_connections=share
                ),
                verify=certificates,
                **options,
            )
            for share in shares
        ]
        self._in_flight = [0] * len(shares)

    @contextmanager
    def least_busy(self) -> Iterator[httpx.AsyncClient]:
        """A client for one request; the first of equally busy ones, so that few connections serve few requests."""
        number = self._in_flight.index(min(self._in_flight))
        self._in_flight[number] += 1
        try:
            yield self._clients[number]
        finally:
            self._in_flight[number] -= 1

    async def aclose(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(client.aclose() for client in self._clients))


@dataclass(slots=True)
class _Loop:
    """What belongs to one event loop."""

    clients: HttpClients
    places: asyncio.Semaphore


class Connections:
    """HTTP clients of one service, separate for each event loop.

    Args:
        number: Connections kept open; with ``bounded`` also the maximum.
        key: Sent in the header ``Authorization`` and nowhere else.
        key_name: Where the key came from, for errors.
        options: Of each ``httpx.AsyncClient``.

    Raises:
        ConfigError: No header can carry the key.
    """

    def __init__(
        self,
        number: int,
        *,
        bounded: bool = True,
        key: str | None = None,
        key_name: str = "the API key",
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._number = number
        self._options: dict[str, Any] = {
            "bounded": bounded,
            "headers": {**(headers or {}), **bearer(key, key_name)},
        } | options
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = WeakKeyDictionary()

    def client(self) -> AbstractContextManager[httpx.AsyncClient]:
        """A client of this event loop for one request."""
        return self._loop().clients.least_busy()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[httpx.AsyncClient]:
        """Wait until fewer than ``number`` others hold a place, then take a client."""
        loop = self._loop()
        async with loop.places:
            with loop.clients.least_busy() as client:
                yield client

    async def close(self) -> None:
        """Close the connections of this event loop."""
        state = self._loops.pop(asyncio.get_running_loop(), None)
        if state is not None:
            await state.clients.aclose()

    def _loop(self) -> _Loop:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            _forget_closed(self._loops)
            clients = HttpClients(self._number, **self._options)
            self._loops[loop] = _Loop(clients, asyncio.Semaphore(self._number))
        return self._loops[loop]


def _forget_closed(by_loop: MutableMapping[asyncio.AbstractEventLoop, Any]) -> None:
    """Release what belongs to closed event loops. Connections hold their loop, so weak keys alone keep both."""
    for loop in [loop for loop in by_loop if loop.is_closed()]:
        del by_loop[loop]


def bearer(key: str | None, key_name: str) -> dict[str, str]:
    """The header that carries ``key``; none without a key.

    Raises:
        ConfigError: No header can carry the key. The message names ``key_name`` and never the key.
    """
    return {"Authorization": f"Bearer {checked_key(key, key_name)}"} if key else {}


def checked_key(key: str, key_name: str) -> str:
    """``key``, if a header can carry it.

    Raises:
        ConfigError: It cannot. The message names ``key_name`` and never the key.
    """
    if not key.isascii() or not key.isprintable() or key.strip() != key:
        raise ConfigError(f"{key_name}: expected printable ASCII without blanks around it")
    return key


def without_key(text: str, key: str | None) -> str:
    """``text``, which may quote a request, with ``***`` in place of the key."""
    return text.replace(key, "***") if key else text


def is_address(url: str) -> bool:
    """Whether ``url`` is an http(s) address with a host and a possible port."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host) and (parsed.port or 1) <= _LAST_PORT


def base_url(url: str) -> str:
    """The address of an OpenAI-compatible server up to ``/v1``, from that of the server or of one of its methods."""
    trimmed = url.rstrip("/").removesuffix("/completions").removesuffix("/chat")
    return trimmed if trimmed.endswith("/v1") else f"{trimmed}/v1"


def server_address(url: str, path: str, variable: str, example: str) -> str:
    """The address of a tool server, without the path of its requests.

    Args:
        variable: The environment variable for the token, which no address may hold.

    Raises:
        ConfigError: It is not ``http://`` or ``https://``, or holds a password.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"urls: got {url!r}: {error}") from None
    if not is_address(url):
        raise ConfigError(f"urls: got {url!r}, expected an address such as {example}")
    if parsed.userinfo:
        raise ConfigError(f"urls: an address holds a password; put the token into {variable} instead")
    return url.rstrip("/").removesuffix(path)
