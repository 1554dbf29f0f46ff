"""Asking the search and page servers: each request to the next server, repeated when one fails or is full."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from afm.errors import ConfigError, ToolError

_MAX_REPLY_BYTES = 8 << 20
_CONNECT_S = 5.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_SHOWN_CHARS = 300
_TOKEN = "WEB_SERVER_TOKEN"


class WebServerError(ToolError):
    """A server gave no answer.

    Attributes:
        kind: What it called the failure; empty when it did not answer at all.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class _AgainError(Exception):
    """One request failed in a way that may pass; ``wait_s`` is set when the server is well but full."""

    def __init__(self, reason: str, kind: str = "", *, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.wait_s = wait_s


class WebClient:
    """A client of one kind of server.

    Args:
        urls: Servers, with or without ``path``.
        token: Sent in the header ``Authorization`` and nowhere else.
        timeout_s: For one request.
        tries: Requests before a failure counts.
        busy_s: How long to keep asking servers that are well but full.

    Raises:
        ConfigError: No address, or one that is not ``http://`` or ``https://``.
    """

    def __init__(
        self,
        urls: Sequence[str],
        path: str,
        *,
        token: str | None,
        timeout_s: float,
        tries: int,
        busy_s: float,
    ) -> None:
        if not urls:
            raise ConfigError(f"urls: got none, expected addresses such as http://127.0.0.1:9000{path}")
        self._urls = [_checked(url, path) for url in urls]
        self._token = token
        self._timeout_s = timeout_s
        self._tries = tries
        self._busy_s = busy_s
        self._turn = itertools.count()
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    async def post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that a server answers.

        Raises:
            WebServerError: None did.
        """
        began, failures, first = time.monotonic(), 0, next(self._turn)
        for attempt in itertools.count():
            url = self._urls[(first + attempt) % len(self._urls)]
            try:
                return await self._once(url, body)
            except _AgainError as error:
                failures += error.wait_s is None
                if failures >= self._tries or time.monotonic() - began > self._busy_s:
                    raise WebServerError(f"{url}: {error}", error.kind) from None
                longest = min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** min(attempt, 10))
                await asyncio.sleep((error.wait_s or 0.0) + random.uniform(longest / 2, longest))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Close the connections of this event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def _once(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                status, headers, content = await self._posted(url, body)
        except TimeoutError:
            raise _AgainError(f"no answer within {self._timeout_s:g} s", "timeout") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _AgainError(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        answer = _object(content)
        if status == 200:
            if answer is None:
                raise _AgainError("its answer is no JSON object", "broken")
            return answer
        told, kind = _told(answer, content)
        if status == 429:
            raise _AgainError(f"busy: {told}", "busy", wait_s=_retry_after_s(headers))
        if status in (401, 403):
            raise WebServerError(f"{url}: refused the token; set {_TOKEN} to the server's", "token")
        if 400 <= status < 500 or (status in (502, 503) and kind):
            raise WebServerError(told, kind)  # the server has tried for us as often as makes sense
        raise _AgainError(f"status {status}: {told}", kind)

    async def _posted(self, url: str, body: Mapping[str, Any]) -> tuple[int, httpx.Headers, bytes]:
        content = bytearray()
        async with self._client().stream("POST", url, json=body) as response:
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > _MAX_REPLY_BYTES:
                    message = f"{url}: its answer is longer than {_MAX_REPLY_BYTES >> 20} MiB"
                    raise WebServerError(message, "too_large")
            return response.status_code, response.headers, bytes(content)

    def _client(self) -> httpx.AsyncClient:
        """The connections of this event loop. No proxy: tool servers are machines of the same cluster."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
                timeout=httpx.Timeout(self._timeout_s, connect=min(_CONNECT_S, self._timeout_s)),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                trust_env=False,
            )
        return self._clients[loop]


def _checked(url: str, path: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"urls: got {url!r}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"urls: got {url!r}, expected an address such as http://127.0.0.1:9000{path}")
    if parsed.userinfo:
        raise ConfigError(f"urls: an address holds a password; put the token into {_TOKEN} instead")
    return url.rstrip("/").removesuffix(path) + path


def _object(content: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _told(answer: dict[str, Any] | None, content: bytes) -> tuple[str, str]:
    if answer is not None and isinstance(answer.get("error"), str):
        return answer["error"][:_SHOWN_CHARS], str(answer.get("kind", ""))
    return content[:_SHOWN_CHARS].decode("utf-8", "replace") or "no text", ""


def _retry_after_s(headers: httpx.Headers) -> float:
    try:
        return min(_LONGEST_PAUSE_S, max(0.0, float(headers.get("Retry-After", "0"))))
    except ValueError:
        return 0.0
