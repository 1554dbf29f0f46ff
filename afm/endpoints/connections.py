"""HTTP connections for many requests at a time, to one server or several, with checked addresses and keys in headers only.

httpx looks at every connection of a client before and after each request. A request of one client with 64 connections
therefore takes several times as long as one of a client with eight (``benchmarks/bench_eval.py``).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import httpx
from pydantic import SecretStr

from afm.configuration import without_password
from afm.endpoints.pace import RETRIED_STATUS, TryAgainError, retry_after_s
from afm.errors import ConfigError, RefusedError
from afm.settings import Environment, load_settings

CONNECT_TIMEOUT_S = 10.0
REST_S = 10.0
"""How long a server that failed is asked after all others."""
_CONNECTIONS_PER_CLIENT = 8
_LAST_PORT = 65_535
_SHOWN = 300


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


@dataclass(slots=True)
class Replica:
    """One of several servers of the same kind."""

    url: str
    in_flight: int = 0
    failed_at: float = float("-inf")

    @property
    def resting(self) -> bool:
        """Whether it failed in the last :data:`REST_S` seconds."""
        return time.monotonic() - self.failed_at < REST_S

    @contextmanager
    def busy(self, *healthy: type[Exception]) -> Iterator[None]:
        """Count a request in flight; an error rests the server.

        A cancellation does not, nor do the errors ``healthy``, which a working server raises too.
        """
        self.in_flight += 1
        try:
            yield
        except healthy:
            raise
        except Exception:
            self.failed_at = time.monotonic()
            raise
        finally:
            self.in_flight -= 1
        self.failed_at = float("-inf")


class Replicas:
    """Several servers of the same kind: the least busy is asked first, in turn among equals, and last those that failed.

    Args:
        urls: Their addresses, at least one.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._replicas = [Replica(url) for url in urls]
        self._turn = itertools.count()

    @property
    def urls(self) -> tuple[str, ...]:
        """Their addresses."""
        return tuple(replica.url for replica in self._replicas)

    def next(self) -> Replica:
        """The one to ask now."""
        return self.order()[0]

    def order(self) -> list[Replica]:
        """All of them, the one to ask now first."""
        turn = next(self._turn) % len(self._replicas)
        in_turn = self._replicas[turn:] + self._replicas[:turn]
        return sorted(in_turn, key=lambda replica: (replica.resting, replica.in_flight))


class AnswerTooLongError(Exception):
    """An answer has more bytes than its reader takes."""


async def read_answer(
    client: httpx.AsyncClient,
    request: httpx.Request,
    *,
    timeout_s: float,
    max_bytes: int,
    decoded: bool = True,
) -> tuple[httpx.Response, bytes]:
    """A server's whole answer to one request.

    Args:
        decoded: Unpack a compressed body; ``max_bytes`` counts the bytes that are returned.

    Raises:
        TimeoutError: It was not there within ``timeout_s``.
        httpx.HTTPError: The connection failed.
        AnswerTooLongError: It was cut off.
    """
    content = bytearray()
    async with asyncio.timeout(timeout_s):
        response = await client.send(request, stream=True)
        try:
            async for piece in response.aiter_bytes(1 << 16) if decoded else response.aiter_raw():
                content += piece
                if len(content) > max_bytes:
                    raise AnswerTooLongError
        finally:
            await response.aclose()
    return response, bytes(content)


async def post(
    client: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    *,
    timeout_s: float,
    max_bytes: int,
    key: str | None = None,
) -> bytes:
    """The body of a model server's answer, uncompressed.

    Args:
        key: Replaced where the server repeats it in an error.

    Raises:
        TryAgainError: It failed in a way that may pass by itself.
        RefusedError: The server refused.
    """
    request = client.build_request("POST", url, json=body)
    try:
        response, data = await read_answer(
            client, request, timeout_s=timeout_s, max_bytes=max_bytes, decoded=False
        )
    except AnswerTooLongError:
        raise TryAgainError("the reply is too long") from None
    except TimeoutError:
        raise TryAgainError(f"ReadTimeout: no whole reply within {timeout_s:g} s") from None
    except httpx.HTTPError as error:
        raise TryAgainError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
    if not response.is_success:
        text = without_key(" ".join(data.decode("utf-8", "replace").split()), key)
        failure = f"status {response.status_code}: {text[:_SHOWN] or 'no text'}"
        if response.status_code in RETRIED_STATUS:
            raise TryAgainError(failure, retry_after_s(response.headers))
        raise RefusedError(f"{url}: {failure}")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise TryAgainError("the reply is compressed, though the request forbids it")
    return data


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


def environment_key(variable: str, environment: Environment | None = None) -> str | None:
    """The key that a variable of the environment holds; none when it is not set, or a placeholder of ``environment.sh``."""
    if variable.isupper() and variable.lower() in Environment.model_fields:
        value = getattr(environment or load_settings(), variable.lower())
        return (value.get_secret_value() if isinstance(value, SecretStr) else value) or None
    return os.environ.get(variable) or None


def address_fault(url: str) -> str:
    """What ``url`` should be to be an http(s) address, empty when it is one. Errors show addresses, so they hold no password."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        return f"http://HOST or https://HOST ({error})"
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 1) > _LAST_PORT:
        return "http://HOST or https://HOST"
    if parsed.userinfo or parsed.query:
        return "an address without user, password and query; a key comes from the environment"
    return ""


def addresses(text: str) -> tuple[str, ...]:
    """The addresses in ``http://a:8000,http://b:8000``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


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
    if fault := address_fault(url):
        if "password" in fault:
            raise ConfigError(
                f"urls: an address holds a password or query; put the token into {variable} instead"
            )
        raise ConfigError(f"urls: got {without_password(url)!r}, expected an address such as {example}")
    return url.rstrip("/").removesuffix(path)
