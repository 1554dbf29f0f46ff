"""The common part of the tools that use our servers: settings, client and messages for failures.

The client sends each request to the next server, and tries the one after it if that server fails or is full.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError

from afm.configuration import Settings, validated
from afm.endpoints.connections import (
    AnswerTooLongError,
    Connections,
    environment_key,
    read_answer,
    server_address,
)
from afm.endpoints.pace import pause_s, retry_after_s
from afm.errors import BadArgumentError, ConfigError, ToolError
from afm.settings import Environment, load_settings
from afm.tools.base import ToolContext, ToolResult, ToolSchema

_KEPT_OPEN = 64
"""Connections to one kind of server that stay open between requests."""
LONGEST_PAUSE_S = 5.0
"""Longest pause before a request is repeated. The episode waits that long."""
_SHOWN_CHARS = 300


class RequestFailedError(Exception):
    """One request failed.

    Attributes:
        kind: The server's name for the failure.
        lasting: Whether the same request to the same server would fail again.
    """

    def __init__(self, reason: str, kind: str = "", *, lasting: bool = False) -> None:
        super().__init__(reason)
        self.kind = kind
        self.lasting = lasting


class ServerFullError(RequestFailedError):
    """The server is healthy but full, and asked for a pause of ``wait_s`` seconds."""

    def __init__(self, reason: str, wait_s: float) -> None:
        super().__init__(reason, "busy")
        self.wait_s = wait_s


def transport_failure(error: Exception) -> RequestFailedError:
    """Return the failure of a request that got no complete answer."""
    return RequestFailedError(f"{type(error).__name__}: {error}".rstrip(": "))


def status_failure(status: int, headers: Mapping[str, str], content: bytes, token: str) -> RequestFailedError:
    """Return the failure of a request with this status. ``token`` is the name of the variable of the server's token."""
    message, kind = read_failure(content)
    if status == 429:
        return ServerFullError(f"busy: {message}", retry_after_s(headers, longest_s=LONGEST_PAUSE_S))
    if status in (401, 403):
        return RequestFailedError(f"refused the token; set {token} to the server's", "token", lasting=True)
    return RequestFailedError(f"status {status}: {message}", kind, lasting=status < 500 and status != 408)


def connections_to(key: str | None, key_name: str) -> Connections:
    """Return connections to our servers, for any event loop."""
    return Connections(
        _KEPT_OPEN,
        bounded=False,
        key=key,
        key_name=key_name,
        headers={"Content-Type": "application/json"},
        trust_env=False,
    )


def read_failure(content: bytes) -> tuple[str, str]:
    """Return the message of a failed request and the server's name for the failure, ``""`` if it gives no name."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        return answer["error"][:_SHOWN_CHARS] or "no text", str(answer.get("kind", ""))
    return content[:_SHOWN_CHARS].decode("utf-8", "replace") or "no text", ""


ReplyT = TypeVar("ReplyT", bound=BaseModel)

_MAX_REPLY_BYTES = 8 << 20
_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A kind of server.

    Attributes:
        path: Path of the requests.
        answer: A description of its answers.
        token: Environment variable of its token.
        address: Returns its address if a tools file does not set one.
    """

    path: str
    answer: str
    token: str
    address: Callable[[Environment], str]


class WebServerError(ToolError):
    """No server gave a usable answer.

    Attributes:
        kind: The server's name for the failure, empty if it did not answer at all.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class WebToolSettings(Settings):
    """Settings that all these tools accept in a tools file."""

    urls: tuple[str, ...] = ()
    """Servers to ask in turn, with or without the path of their requests. By default the address in the environment."""
    timeout_s: float = Field(default=95.0, gt=0)
    """Time limit of a request in seconds."""
    tries: int = Field(default=2, ge=1)
    """Attempts before a call fails, each with the next server."""
    busy_s: float = Field(default=120.0, ge=0)
    """Seconds to keep asking servers that are healthy but full."""


MARGIN_S = 2.0
"""Seconds for the transfer. A server gets a time limit that is shorter by this margin."""


SettingsT = TypeVar("SettingsT", bound=WebToolSettings)
AskedT = TypeVar("AskedT")


class WebTool(ABC, Generic[SettingsT, AskedT, ReplyT]):
    """A tool that asks a server of one kind.

    Attributes:
        settings_type: The type of ``config`` in a tools file.
        reply_type: The type of the server's answer.
        usual_name: The name of a tool that is made without a tools file.
        failure: What did not happen, such as ``nothing was searched``.

    Args:
        urls: At least one address. The path of the requests may be omitted.
        token: Sent only in the header ``Authorization``.

    Raises:
        ConfigError: There is no address, one is not ``http://`` or ``https://``, or the token does not fit in a header.
    """

    settings_type: type[SettingsT]
    reply_type: type[ReplyT]
    server: ClassVar[ServerKind]
    usual_name: ClassVar[str]
    failure: ClassVar[str]

    def __init__(
        self,
        urls: Sequence[str],
        *,
        settings: SettingsT | None = None,
        token: str | None = None,
        name: str | None = None,
        schema: ToolSchema | None = None,
    ) -> None:
        self.name = name or self.usual_name
        self.schema = schema
        self.settings = settings or self.settings_type()
        example = f"http://127.0.0.1:9000{self.server.path}"
        if not urls:
            raise ConfigError(f"urls: got none, expected addresses such as {example}")
        path, variable = self.server.path, self.server.token
        self._urls = [server_address(url, path, variable, example) + path for url in urls]
        self._turn = itertools.count()
        self._connections = connections_to(token, variable)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> Self:
        """Return a tool with the settings of a tools file. See its ``settings_type``.

        Raises:
            ConfigError: A setting is invalid. The message names the file, the key path, the value and the expectation.
        """
        settings = validated(cls.settings_type, config, context.label, context.at)
        environment = load_settings()
        try:
            return cls(
                settings.urls or (cls.server.address(environment),),
                settings=settings,
                token=environment_key(cls.server.token, environment),
                name=context.schema.function.name,
                schema=context.schema,
            )
        except ConfigError as error:
            raise ConfigError(f"{context.label}: {context.at}: {error}") from None

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the servers."""
        return tuple(url.removesuffix(self.server.path) for url in self._urls)

    @classmethod
    @abstractmethod
    def read(cls, argument: str) -> AskedT:
        """See :class:`afm.tools.base.ReadingTool`."""

    @abstractmethod
    def request(self, asked: AskedT) -> Mapping[str, Any]:
        """Return the request body for a result of :meth:`read`."""

    @abstractmethod
    def shown(self, reply: ReplyT) -> ToolResult:
        """Return the observation for an answer."""

    async def call(self, argument: str) -> ToolResult:
        """See :class:`afm.tools.base.Tool`. ``meta`` holds ``wall_s``, the seconds of an answered call."""
        try:
            body = self.request(self.read(argument))
        except BadArgumentError as error:
            return ToolResult(error.message, meta={"reason": "bad_argument"})
        began = time.monotonic()
        try:
            reply = await self._post(body)
        except WebServerError as error:
            if error.kind == "request":
                refused = self.refusal(str(error))
                return ToolResult(refused.message, meta={"reason": "bad_argument"})
            text = f"The {self.name} tool failed, {self.failure}: {error}"
            return ToolResult(text, ok=False, meta={"reason": error.kind or "server", "error": str(error)})
        result = self.shown(reply)
        return ToolResult(
            result.text, result.ok, {**result.meta, "wall_s": round(time.monotonic() - began, 4)}
        )

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._connections.close()

    @classmethod
    def refusal(cls, reason: str) -> BadArgumentError:
        """Return the error for an invalid argument."""
        return BadArgumentError(f"{cls.failure[0].upper()}{cls.failure[1:]}: {reason}.")

    async def _post(self, body: Mapping[str, Any]) -> ReplyT:
        """Return the answer of a server.

        Raises:
            WebServerError: No server gave a usable answer.
        """
        content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        began, failures, first = time.monotonic(), 0, next(self._turn)
        for attempt in itertools.count():
            url = self._urls[(first + attempt) % len(self._urls)]
            try:
                return await self._once(url, content)
            except RequestFailedError as error:
                wait_s = error.wait_s if isinstance(error, ServerFullError) else 0.0
                failures += not isinstance(error, ServerFullError)
                vain = error.lasting and len(self._urls) == 1
                if vain or failures >= self.settings.tries or time.monotonic() - began > self.settings.busy_s:
                    raise WebServerError(f"{url}: {error}", error.kind) from None
                await asyncio.sleep(pause_s(attempt, wait_s, longest_s=LONGEST_PAUSE_S))
        raise AssertionError("unreachable")

    async def _once(self, url: str, body: bytes) -> ReplyT:
        seconds = self.settings.timeout_s
        patience = httpx.Timeout(seconds, connect=min(_CONNECT_S, seconds))
        try:
            with self._connections.client() as client:
                request = client.build_request("POST", url, content=body, timeout=patience)
                response, content = await read_answer(
                    client, request, timeout_s=seconds, max_bytes=_MAX_REPLY_BYTES
                )
        except AnswerTooLongError:
            reason = f"its answer is longer than {_MAX_REPLY_BYTES >> 20} MiB"
            raise RequestFailedError(reason, "too_large", lasting=True) from None
        except TimeoutError:
            raise RequestFailedError(f"no answer within {seconds:g} s", "timeout") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise transport_failure(error) from None
        if (status := response.status_code) != 200:
            message, kind = read_failure(content)
            failure = status_failure(status, response.headers, content, self.server.token)
            if kind and (failure.lasting or status in (502, 503)) and failure.kind != "token":
                raise WebServerError(message, kind)  # the server has already retried
            raise failure
        try:
            return self.reply_type.model_validate_json(content)
        except ValidationError:
            raise RequestFailedError(
                f"its answer is not {self.server.answer}", "broken", lasting=True
            ) from None
