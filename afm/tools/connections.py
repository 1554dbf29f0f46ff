"""Connections to tool servers: machines of the same cluster, asked with a token and never through a proxy."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

import httpx

from afm.clients import HttpClients, forget_closed
from afm.errors import ConfigError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_KEPT_OPEN = 64
_SHOWN_CHARS = 300
_LAST_PORT = 65_535


class Connections:
    """HTTP clients for each event loop.

    Args:
        token: Sent in the header ``Authorization`` and nowhere else.
        variable: The environment variable that it comes from.

    Raises:
        ConfigError: No header can carry the token.
    """

    def __init__(self, token: str | None, variable: str) -> None:
        if token is not None and not (token.isascii() and token.isprintable() and token == token.strip()):
            raise ConfigError(f"{variable}: expected printable ASCII without blanks around it")
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, HttpClients] = WeakKeyDictionary()

    def client(self) -> AbstractContextManager[httpx.AsyncClient]:
        """One of this event loop for one request, which brings its own timeout."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            forget_closed(self._clients)
            self._clients[loop] = HttpClients(
                _KEPT_OPEN, bounded=False, headers=self._headers, trust_env=False
            )
        return self._clients[loop].one()

    async def close(self) -> None:
        """Close the connections of this event loop."""
        clients = self._clients.pop(asyncio.get_running_loop(), None)
        if clients is not None:
            await clients.aclose()


def server_address(url: str, path: str, variable: str, example: str) -> str:
    """The address of a server, without the path of its requests.

    Args:
        variable: The environment variable for what must not stand in an address.

    Raises:
        ConfigError: It is not ``http://`` or ``https://``, or holds a password.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"urls: got {url!r}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 1) > _LAST_PORT:
        raise ConfigError(f"urls: got {url!r}, expected an address such as {example}")
    if parsed.userinfo:
        raise ConfigError(f"urls: an address holds a password; put the token into {variable} instead")
    return url.rstrip("/").removesuffix(path)


def pause_s(attempt: int, asked_s: float = 0.0) -> float:
    """Exponential, with jitter so that clients do not come back together; at least what a server asked for."""
    longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, 10))
    return asked_s + random.uniform(longest / 2, longest)


def retry_after_s(headers: Mapping[str, str]) -> float:
    """The pause that a busy server asks for, within reason; 0 when it names none."""
    try:
        return min(_LONGEST_PAUSE_S, max(0.0, float(headers.get("Retry-After", "0"))))
    except ValueError:
        return 0.0


def told(content: bytes) -> tuple[str, str]:
    """What a server says of a failure, and what it calls that kind of failure; empty when it does not say."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        return answer["error"][:_SHOWN_CHARS] or "no text", str(answer.get("kind", ""))
    return content[:_SHOWN_CHARS].decode("utf-8", "replace") or "no text", ""
