"""Asking servers that answer JSON: each request to the next server, repeated when one fails or is full."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, SecretStr, ValidationError

from afm.endpoints.connections import Connections, server_address
from afm.endpoints.retry import pause_s, retry_after_s
from afm.errors import ConfigError, ToolError
from afm.settings import Environment
from afm.tools.answers import KEPT_OPEN, LONGEST_PAUSE_S, read_failure

ReplyT = TypeVar("ReplyT", bound=BaseModel)

_MAX_REPLY_BYTES = 8 << 20
_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A kind of server.

    Attributes:
        path: Where requests are posted.
        answer: What its answers look like, in words.
        token: Environment variable of its token.
        address: Where it is when a tools file does not say.
    """

    path: str
    answer: str
    token: str
    address: Callable[[Environment], str]

    def secret(self, environment: Environment) -> str | None:
        """The token itself."""
        value: SecretStr | None = getattr(environment, self.token.lower())
        return value.get_secret_value() if value else None


class WebServerError(ToolError):
    """A server gave no answer.

    Attributes:
        kind: What it called the failure; empty when it did not answer at all.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class _FailedError(Exception):
    """One request brought nothing.

    Attributes:
        wait_s: Set when the server is well but full.
        lasting: Asking this server again is vain.
    """

    def __init__(
        self, reason: str, kind: str = "", *, wait_s: float | None = None, lasting: bool = False
    ) -> None:
        super().__init__(reason)
        self.kind = kind
        self.wait_s = wait_s
        self.lasting = lasting


class WebClient:
    """A client of one kind of server.

    Args:
        urls: Servers, with or without the kind's path.
        token: Sent in the header ``Authorization`` and nowhere else.
        timeout_s: For one request.
        tries: Requests before a failure counts.
        busy_s: How long to keep asking servers that are well but full.

    Raises:
        ConfigError: No address, one that is not ``http://`` or ``https://``, or a token that no header can carry.
    """

    def __init__(
        self,
        urls: Sequence[str],
        kind: ServerKind,
        *,
        token: str | None,
        timeout_s: float,
        tries: int,
        busy_s: float,
    ) -> None:
        example = f"http://127.0.0.1:9000{kind.path}"
        if not urls:
            raise ConfigError(f"urls: got none, expected addresses such as {example}")
        self._urls = [server_address(url, kind.path, kind.token, example) + kind.path for url in urls]
        self._kind = kind
        self._timeout_s = timeout_s
        self._tries = tries
        self._busy_s = busy_s
        self._turn = itertools.count()
        self._connections = Connections(
            KEPT_OPEN,
            bounded=False,
            key=token,
            key_name=kind.token,
            headers={"Content-Type": "application/json"},
            trust_env=False,
        )

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses, without the path of requests."""
        return tuple(url.removesuffix(self._kind.path) for url in self._urls)

    async def post(self, body: Mapping[str, Any], reply: type[ReplyT]) -> ReplyT:
        """What a server answers.

        Raises:
            WebServerError: None did.
        """
        content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        began, failures, first = time.monotonic(), 0, next(self._turn)
        for attempt in itertools.count():
            url = self._urls[(first + attempt) % len(self._urls)]
            try:
                return await self._once(url, content, reply)
            except _FailedError as error:
                failures += error.wait_s is None
                vain = error.lasting and len(self._urls) == 1
                if vain or failures >= self._tries or time.monotonic() - began > self._busy_s:
                    raise WebServerError(f"{url}: {error}", error.kind) from None
                await asyncio.sleep(pause_s(attempt, error.wait_s or 0.0, longest_s=LONGEST_PAUSE_S))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._connections.close()

    async def _once(self, url: str, body: bytes, reply: type[ReplyT]) -> ReplyT:
        try:
            async with asyncio.timeout(self._timeout_s):
                status, headers, content = await self._posted(url, body)
        except TimeoutError:
            raise _FailedError(f"no answer within {self._timeout_s:g} s", "timeout") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _FailedError(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        if status != 200:
            raise self._failure(status, headers, content)
        try:
            return reply.model_validate_json(content)
        except ValidationError:
            raise _FailedError(f"its answer is not {self._kind.answer}", "broken", lasting=True) from None

    def _failure(
        self, status: int, headers: Mapping[str, str], content: bytes
    ) -> _FailedError | WebServerError:
        message, kind = read_failure(content)
        if status == 429:
            return _FailedError(
                f"busy: {message}", "busy", wait_s=retry_after_s(headers, longest_s=LONGEST_PAUSE_S)
            )
        if status in (401, 403):
            reason = f"refused the token; set {self._kind.token} to the server's"
            return _FailedError(reason, "token", lasting=True)
        lasting = 400 <= status < 500 and status != 408
        if kind and (lasting or status in (502, 503)):
            return WebServerError(message, kind)  # the server has tried for us as often as makes sense
        return _FailedError(f"status {status}: {message}", kind, lasting=lasting)

    async def _posted(self, url: str, body: bytes) -> tuple[int, httpx.Headers, bytes]:
        content = bytearray()
        patience = httpx.Timeout(self._timeout_s, connect=min(_CONNECT_S, self._timeout_s))
        with self._connections.client() as client:
            async with client.stream("POST", url, content=body, timeout=patience) as response:
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > _MAX_REPLY_BYTES:
                        reason = f"its answer is longer than {_MAX_REPLY_BYTES >> 20} MiB"
                        raise _FailedError(reason, "too_large", lasting=True)
                return response.status_code, response.headers, bytes(content)
