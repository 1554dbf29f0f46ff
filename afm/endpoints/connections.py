"""HTTP connections for many parallel requests to one or several servers. Addresses are checked, keys go only in headers.

httpx checks every connection of a client before and after each request. With 64 connections per client, a request
therefore takes several times as long as with eight (``benchmarks/bench_eval.py``).
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

from afm.endpoints.pace import RETRIED_STATUS, TryAgainError, retry_after_s
from afm.errors import ConfigError, RefusedError, without_password
from afm.settings import Environment, load_settings

CONNECT_TIMEOUT_S = 10.0
REST_S = 10.0
"""Seconds for which a failed server is asked after all others."""
_CONNECTIONS_PER_CLIENT = 8
_LAST_PORT = 65_535
_SHOWN = 300


class HttpClients:
    """Clients with a few connections each. A request uses the least busy one.

    Args:
        connections: Number of connections of all clients that stay open between requests.
        bounded: Whether this is also the maximum. Further requests then wait in their client.
        options: Arguments of each ``httpx.AsyncClient``.
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
        """Yield a client for one request. Of equally busy ones it is the first, so that few requests use few connections."""
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
    """Clients of one event loop."""

    clients: HttpClients
    places: asyncio.Semaphore


class Connections:
    """HTTP clients of one service, separate for each event loop.

    Args:
        number: Number of connections that stay open. With ``bounded`` also the maximum.
        key: Sent only in the header ``Authorization``.
        key_name: Source of the key, for errors.
        options: Arguments of each ``httpx.AsyncClient``.

    Raises:
        ConfigError: The key is not valid in a header.
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
        """Return a client of this event loop for one request."""
        return self._loop().clients.least_busy()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[httpx.AsyncClient]:
        """Wait until fewer than ``number`` requests are in flight, and yield a client."""
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
    """Release the clients of closed event loops. Connections reference their loop, so weak keys would not free them."""
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
        """Whether the server failed in the last :data:`REST_S` seconds."""
        return time.monotonic() - self.failed_at < REST_S

    @contextmanager
    def busy(self, *healthy: type[Exception]) -> Iterator[None]:
        """Count a request in flight. After an error the server rests.

        A cancellation does not count as an error, nor do exceptions of the types ``healthy``.
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
    """Several servers of the same kind. The least busy one is asked first, equals in turn, and failed ones last.

    Args:
        urls: At least one address.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._replicas = [Replica(url) for url in urls]
        self._turn = itertools.count()

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the servers."""
        return tuple(replica.url for replica in self._replicas)

    def next(self) -> Replica:
        """Return the server to ask next."""
        return self.order()[0]

    def order(self) -> list[Replica]:
        """Return all servers, beginning with the one to ask next."""
        turn = next(self._turn) % len(self._replicas)
        in_turn = self._replicas[turn:] + self._replicas[:turn]
        return sorted(in_turn, key=lambda replica: (replica.resting, replica.in_flight))


class AnswerTooLongError(Exception):
    """An answer is longer than its limit in bytes."""


async def read_answer(
    client: httpx.AsyncClient,
    request: httpx.Request,
    *,
    timeout_s: float,
    max_bytes: int,
    decoded: bool = True,
) -> tuple[httpx.Response, bytes]:
    """Send one request and return the complete answer.

    Args:
        decoded: Decompress the body. ``max_bytes`` counts the returned bytes.

    Raises:
        TimeoutError: The answer was not complete within ``timeout_s``.
        httpx.HTTPError: The connection failed.
        AnswerTooLongError: The answer exceeds ``max_bytes``.
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
    """Return the body of a model server's answer, which must not be compressed.

    Args:
        key: Removed from the server's error message.

    Raises:
        TryAgainError: The request failed, and a retry may succeed.
        RefusedError: The server rejected the request.
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
    """Return the headers with ``key``. Empty without a key.

    Raises:
        ConfigError: The key is not valid in a header. The message contains ``key_name`` but never the key.
    """
    return {"Authorization": f"Bearer {checked_key(key, key_name)}"} if key else {}


def checked_key(key: str, key_name: str) -> str:
    """Return ``key`` if it is valid in a header.

    Raises:
        ConfigError: It is not. The message contains ``key_name`` but never the key.
    """
    if not key.isascii() or not key.isprintable() or key.strip() != key:
        raise ConfigError(f"{key_name}: expected printable ASCII without blanks around it")
    return key


def without_key(text: str, key: str | None) -> str:
    """Return ``text``, which may quote a request, with ``***`` in place of the key."""
    return text.replace(key, "***") if key else text


def environment_key(variable: str, environment: Environment | None = None) -> str | None:
    """Return the key in an environment variable. ``None`` if it is unset, or a placeholder of ``environment.sh``."""
    if variable.isupper() and variable.lower() in Environment.model_fields:
        value = getattr(environment or load_settings(), variable.lower())
        return (value.get_secret_value() if isinstance(value, SecretStr) else value) or None
    return os.environ.get(variable) or None


def address_fault(url: str) -> str:
    """Return what was expected in place of ``url``. Empty for a valid http(s) address without a password."""
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
    """Split a comma-separated list of addresses, such as ``http://a:8000,http://b:8000``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def base_url(url: str) -> str:
    """Return the address of an OpenAI-compatible server up to ``/v1``, given the address of the server or of a method."""
    trimmed = url.rstrip("/").removesuffix("/completions").removesuffix("/chat")
    return trimmed if trimmed.endswith("/v1") else f"{trimmed}/v1"


def server_address(url: str, path: str, variable: str, example: str) -> str:
    """Return the address of a tool server without the path of its requests.

    Args:
        variable: Environment variable of the token, which must not be in the address.

    Raises:
        ConfigError: The address is not ``http://`` or ``https://``, or contains a password.
    """
    if fault := address_fault(url):
        if "password" in fault:
            raise ConfigError(
                f"urls: an address holds a password or query; put the token into {variable} instead"
            )
        raise ConfigError(f"urls: got {without_password(url)!r}, expected an address such as {example}")
    return url.rstrip("/").removesuffix(path)
