"""Fetch a public page for an agent: guarded, bounded in bytes, pieces, time and redirects, with typed errors."""

from __future__ import annotations

import asyncio
import ssl
import zlib
from collections.abc import AsyncIterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated
from urllib.parse import urljoin

import httpcore
import httpx
from pydantic import Field
from starlette.datastructures import Headers

from afm.errors import ToolError
from tool_servers.shared.command import CORES, ServerSettings, or_cores
from tool_servers.shared.fetch_connect import (
    Dial,
    FetchMeter,
    GuardedNetwork,
    Resolve,
    UnresolvedError,
    dial,
    metering,
    resolve,
)
from tool_servers.shared.url_guard import DEFAULT_PORTS, BlockedError, Policy, Target, target_of

_MEMBERS = 1_000
_GZIP_MARK = 0x1F
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_CONNECTIONS = 200
_KEEP_ALIVE_S = 10.0
USER_AGENT = "Mozilla/5.0 (compatible; afm-page-reader/0.1)"


class FetcherSettings(ServerSettings):
    """What a server may fetch from the web for agents."""

    trusted: tuple[str, ...] = ()
    """``host:port`` pairs that may be read although they are not public, such as a test site on this machine."""
    ports: tuple[int, ...] = tuple(sorted(DEFAULT_PORTS))
    """Ports that may be read on public hosts."""
    max_bytes: int = Field(default=10 << 20, ge=1024)
    """Largest file to fetch, in bytes, before and after decompression."""
    fetch_s: float = Field(default=30.0, gt=0)
    """Seconds for one fetch, including redirects."""
    workers: Annotated[int, or_cores(4)] = Field(default=CORES, ge=1, validate_default=True)
    """Processes that parse fetched files. ``null``: one per core, at most four."""
    cached_s: float = Field(default=3 * 3600.0, gt=0)
    """Seconds that results stay in the cache."""
    request_s: float = Field(default=90.0, gt=0)
    """Seconds for a request that names no time limit of its own."""

    def policy(self) -> Policy:
        """Return the policy of the guard."""
        return Policy(frozenset(self.ports), frozenset(self.trusted))


class FetchFault(StrEnum):
    """Why a page was not fetched."""

    BLOCKED = "blocked"
    """The address, or one that it redirects to, is not a public web address."""
    NAME = "name"
    """The host's name cannot be resolved."""
    CONNECT = "connect"
    """No server answers, or TLS fails."""
    TIMEOUT = "timeout"
    STATUS = "status"
    """An HTTP status other than 2xx."""
    REDIRECTS = "redirects"
    """Too many redirects, or one without a valid address."""
    TOO_LARGE = "too_large"
    TYPE = "type"
    """A media type that is not read."""
    BROKEN = "broken"
    """The answer is incomplete, not HTTP, or not compressed as announced."""
    PARSE = "parse"
    """The page arrived, but its text could not be extracted."""


class FetchError(ToolError):
    """A page could not be fetched.

    Attributes:
        fault: The kind of failure.
        status: HTTP status, if the server answered.
    """

    def __init__(self, fault: FetchFault, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        self.status = status


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of one fetch.

    Attributes:
        max_bytes: Largest body, before and after decompression; :class:`FetchMeter` bounds its pieces.
        total_s: Seconds in total, including redirects and name look-ups.
        connect_s: Seconds for one connection.
        redirects: Most redirects to follow.
        types: Prefixes of the accepted media types.
        accept: The header ``Accept``.
    """

    max_bytes: int = 10 << 20
    total_s: float = 30.0
    connect_s: float = 10.0
    redirects: int = 5
    types: tuple[str, ...] = (
        "text/",
        "application/xhtml",
        "application/xml",
        "application/json",
        "application/pdf",
    )
    accept: str = "text/html,application/xhtml+xml,application/pdf,application/json;q=0.9,text/*;q=0.8"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A page as received.

    Attributes:
        url: Address after redirects.
        media_type: Lower case, without parameters; empty if the server sent none.
        charset: Charset from the header.
    """

    url: str
    status: int
    media_type: str
    charset: str | None
    body: bytes


class TooLongError(Exception):
    """A body has more bytes than allowed."""


class CodingError(Exception):
    """A body is not in its announced encoding."""


class Inflater:
    """Collects and decompresses a body piece by piece, and never holds more than ``max_bytes``.

    A gzip body may consist of several members. Other bytes after its end are ignored, as browsers do.

    Args:
        coding: The ``Content-Encoding``: empty, ``identity``, ``gzip`` or ``deflate``.

    Raises:
        CodingError: The coding is another one.
    """

    def __init__(self, coding: str, max_bytes: int) -> None:
        coding = coding.strip().lower()
        if coding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise CodingError(f"the page has the encoding {coding[:40]!r}, expected gzip or none")
        self._max_bytes = max_bytes
        self._deflate = coding == "deflate"
        self._unpacker = zlib.decompressobj(47) if coding not in ("", "identity") else None
        self._gzip, self._members = coding in ("gzip", "x-gzip"), 1
        self._body = bytearray()
        self._received = 0
        self._over = False

    def add(self, chunk: bytes) -> None:
        """Add the next bytes from the network.

        Raises:
            TooLongError: The body is too long.
            CodingError: The body is not compressed as announced.
        """
        self._received += len(chunk)
        if self._received > self._max_bytes:
            raise TooLongError
        if self._unpacker is None:
            self._body += chunk
            return
        if self._deflate and self._received == len(chunk) and chunk and chunk[0] & 0x0F != 8:
            self._unpacker = zlib.decompressobj(-15)  # some servers leave out the zlib header
        while chunk and not self._over:
            if self._unpacker.eof:
                self._next_member(chunk)
                continue
            room = self._max_bytes - len(self._body)
            try:
                self._body += self._unpacker.decompress(chunk, room + 1)
            except zlib.error as error:
                raise CodingError(f"the page is not compressed as announced: {error}") from None
            if len(self._body) > self._max_bytes:
                raise TooLongError
            chunk = self._unpacker.unused_data

    def _next_member(self, rest: bytes) -> None:
        """Start another member if ``rest`` begins with one."""
        self._over = not self._gzip or rest[0] != _GZIP_MARK
        if self._over:
            return
        self._members += 1
        if self._members > _MEMBERS:
            raise CodingError(f"the page has more than {_MEMBERS} gzip members")
        self._unpacker = zlib.decompressobj(31)

    def body(self) -> bytes:
        """Return the whole body.

        Raises:
            CodingError: The compressed body is incomplete.
        """
        if self._unpacker is not None and self._received and not self._unpacker.eof:
            raise CodingError("the compressed page is incomplete")
        return bytes(self._body)


class Fetcher:
    """Fetches pages over one connection pool, without proxy, cookies and credentials.

    Args:
        resolve: Name look-up; by default that of the system.
        dial: Opens sockets; by default plain TCP.
        ssl_context: Trusted certificate authorities.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        limits: FetchLimits | None = None,
        *,
        resolve: Resolve = resolve,
        dial: Dial = dial,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._policy = policy or Policy()
        self._limits = limits or FetchLimits()
        self._network = GuardedNetwork(self._policy, resolve, dial)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context or httpx.create_ssl_context(),
            max_connections=_MAX_CONNECTIONS,
            keepalive_expiry=_KEEP_ALIVE_S,
            network_backend=self._network,
        )

    async def fetch(self, url: str) -> Fetched:
        """Fetch the page at ``url`` and follow redirects.

        Raises:
            FetchError: The page could not be fetched; the message can be shown to the agent.
        """
        try:
            async with asyncio.timeout(self._limits.total_s):
                return await self._followed(url)
        except BlockedError as error:
            raise FetchError(FetchFault.BLOCKED, str(error)) from None
        except (TimeoutError, httpcore.TimeoutException):
            raise FetchError(
                FetchFault.TIMEOUT, f"no complete answer within {self._limits.total_s:g} s"
            ) from None
        except UnresolvedError as error:
            raise FetchError(FetchFault.NAME, str(error)) from None
        except httpcore.ConnectError as error:
            raise FetchError(
                FetchFault.CONNECT, f"the server cannot be reached: {error}".rstrip(": ")
            ) from None
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise FetchError(FetchFault.BROKEN, f"the answer is broken: {error}".rstrip(": ")) from None

    async def check(self, url: str) -> None:
        """Check an address that another service will fetch; a name that cannot be resolved here passes.

        Raises:
            FetchError: The address is not a public web address.
        """
        try:
            target = target_of(url, self._policy)
            await self._network.judged(target.host, target.port, self._limits.connect_s)
        except BlockedError as error:
            raise FetchError(FetchFault.BLOCKED, str(error)) from None
        except UnresolvedError:
            return

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.aclose()

    async def _followed(self, url: str) -> Fetched:
        meter = FetchMeter(self._limits.max_bytes)
        metering.set(meter)
        for _ in range(self._limits.redirects + 1):
            target = target_of(url, self._policy)
            answer = await self._asked(target, meter)
            if isinstance(answer, Fetched):
                return answer
            url = answer
        raise FetchError(FetchFault.REDIRECTS, f"more than {self._limits.redirects} redirects")

    async def _asked(self, target: Target, meter: FetchMeter) -> Fetched | str:
        """Return the page, or the address that it redirects to."""
        limits = self._limits
        seconds = {
            "connect": limits.connect_s,
            "read": limits.total_s,
            "write": limits.connect_s,
            "pool": limits.total_s,
        }
        meter.in_head = True
        url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
        async with self._pool.stream(
            "GET", url, headers=_headers(target, limits.accept), extensions={"timeout": seconds}
        ) as response:
            meter.in_head = False
            headers = Headers(raw=[(name.lower(), value) for name, value in response.headers])
            if response.status in _REDIRECTS:
                return _next_url(target, headers.get("location", ""))
            if not 200 <= response.status < 300:
                message = f"the server answers with status {response.status}"
                raise FetchError(FetchFault.STATUS, message, status=response.status)
            media_type, charset = _media_type(headers.get("content-type", ""))
            if media_type and not self._reads(media_type):
                message = f"the address leads to a file of type {media_type[:60]!r}, which is not read"
                raise FetchError(FetchFault.TYPE, message, status=response.status)
            body = await self._body(response.aiter_stream(), headers, meter)
        return Fetched(target.url, response.status, media_type, charset, body)

    async def _body(self, chunks: AsyncIterable[bytes], headers: Headers, meter: FetchMeter) -> bytes:
        most = self._limits.max_bytes
        length = headers.get("content-length", "")
        try:
            if length.isdecimal() and int(length[:20]) > most:
                raise TooLongError
            inflater = Inflater(headers.get("content-encoding", ""), most)
            async for chunk in chunks:
                await meter.step()
                inflater.add(chunk)
            return inflater.body()
        except TooLongError:
            raise FetchError(FetchFault.TOO_LARGE, f"the page is larger than {most} bytes") from None
        except CodingError as error:
            raise FetchError(FetchFault.BROKEN, str(error)) from None

    def _reads(self, media_type: str) -> bool:
        return media_type.startswith(self._limits.types) or media_type.endswith(("+json", "+xml"))


def _headers(target: Target, accept: str) -> list[tuple[str, str]]:
    return [
        ("Host", target.authority),
        ("User-Agent", USER_AGENT),
        ("Accept", accept),
        ("Accept-Language", "en,*;q=0.5"),
        ("Accept-Encoding", "gzip"),
    ]


def _next_url(target: Target, location: str) -> str:
    """Return the address of a redirect; non-ASCII header bytes are UTF-8 in practice."""
    if not location:
        raise FetchError(FetchFault.REDIRECTS, "a redirect has no address")
    try:
        return urljoin(target.url, location.encode("latin-1").decode("utf-8", "replace").strip())
    except ValueError:
        raise FetchError(FetchFault.REDIRECTS, "a redirect has an invalid address") from None


def _media_type(header: str) -> tuple[str, str | None]:
    media_type, _, parameters = header.partition(";")
    charset = None
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            charset = value.strip().strip("\"'") or None
    return media_type.strip().lower(), charset
