"""Requests to a service that the operator chose (search, reader, model): bounded, retried when busy, with typed errors.

Keys are sent in headers only. No message contains a header, a request body, or a key that an answer repeats.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx
from pydantic import SecretStr

from afm.endpoints.chat import UnfinishedReasoningError, without_reasoning
from afm.endpoints.connections import AnswerTooLongError, address_fault, checked_key, read_answer
from afm.endpoints.pace import RETRIED_STATUS, TryAgainError, persistently, retry_after_s
from afm.errors import ConfigError, ToolError, without_password
from afm.trajectory.observation import readable

_LONGEST_PAUSE_S = 8.0


class Trouble(StrEnum):
    """Why a service did not answer."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    STATUS = "status"
    KEY = "key"
    """The service refuses the key or requires one."""
    BUSY = "busy"
    """Status 429, also for the last attempt."""
    TOO_LARGE = "too_large"
    BROKEN = "broken"
    """The answer is incomplete or not the expected JSON."""
    BUDGET = "budget"
    """The run has used up its calls."""


class UpstreamError(ToolError):
    """A service did not answer.

    Attributes:
        trouble: The kind of failure.
    """

    def __init__(self, trouble: Trouble, message: str) -> None:
        super().__init__(message)
        self.trouble = trouble


class _AgainError(TryAgainError):
    """A failure that a retry may fix."""

    def __init__(self, error: UpstreamError, wait_s: float = 0.0) -> None:
        super().__init__(str(error), wait_s)
        self.error = error


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to keep asking a service.

    Attributes:
        tries: Most requests.
        try_s: Seconds for one request.
        total_s: Seconds for all requests and the pauses between them.
        max_bytes: Largest answer.
    """

    tries: int = 4
    try_s: float = 20.0
    total_s: float = 40.0
    max_bytes: int = 4 << 20


class Upstream:
    """One service.

    Args:
        name: What messages call the service.
        url: Base URL.
        key: Sent in the header ``key_header``, after ``key_prefix``.

    Raises:
        ConfigError: The URL or the key is invalid.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        key: SecretStr | None = None,
        key_header: str = "Authorization",
        key_prefix: str = "Bearer ",
        headers: Mapping[str, str] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.name = name
        if fault := address_fault(url):
            raise ConfigError(f"{name}: got {without_password(url)!r}, expected {fault}")
        self._url = url.rstrip("/")
        self._patience = patience or Patience()
        own = dict(headers or {})
        if key is not None:
            own[key_header] = key_prefix + checked_key(key.get_secret_value(), f"the key of {name}")
        self._client = httpx.AsyncClient(
            headers=own,
            timeout=self._patience.try_s,
            limits=httpx.Limits(max_connections=100, max_keepalive_connections=20),
        )

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: object | None = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> Any:
        """Send a request and return the JSON of the answer.

        Args:
            path: Appended to the base URL unchanged.
            seconds: Time limit, if shorter than the service's own.

        Raises:
            UpstreamError: The service did not answer.
        """
        total = self._patience.total_s if seconds is None else min(seconds, self._patience.total_s)
        request = self._client.build_request(
            method, self._url + path, json=body, params=params, headers=headers
        )
        last = UpstreamError(Trouble.TIMEOUT, f"{self.name} gave no answer within {total:g} s")

        async def once() -> Any:
            nonlocal last
            try:
                return await self._once(request)
            except _AgainError as again:
                last = again.error
                raise

        try:
            async with asyncio.timeout(total):
                return await persistently(self._patience.tries, once, longest_s=_LONGEST_PAUSE_S)
        except (TimeoutError, _AgainError):
            raise last from None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _once(self, request: httpx.Request) -> Any:
        limits = self._patience
        try:
            response, content = await read_answer(
                self._client, request, timeout_s=limits.try_s, max_bytes=limits.max_bytes
            )
        except AnswerTooLongError:
            message = f"the answer of {self.name} is larger than {limits.max_bytes} bytes"
            raise UpstreamError(Trouble.TOO_LARGE, message) from None
        except (TimeoutError, httpx.TimeoutException):
            message = f"{self.name} gave no answer within {limits.try_s:g} s"
            raise _AgainError(UpstreamError(Trouble.TIMEOUT, message)) from None
        except httpx.ConnectError:
            raise _AgainError(UpstreamError(Trouble.CONNECT, f"{self.name} cannot be reached")) from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            message = f"the answer of {self.name} is broken ({type(error).__name__})"
            raise _AgainError(UpstreamError(Trouble.BROKEN, message)) from None
        self._check_status(response)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise UpstreamError(Trouble.BROKEN, f"the answer of {self.name} is not JSON") from None

    def _check_status(self, response: httpx.Response) -> None:
        status = response.status_code
        if response.is_success:
            return
        if status in (401, 403):
            raise UpstreamError(Trouble.KEY, f"{self.name} refuses the key (status {status})")
        trouble = Trouble.BUSY if status == 429 else Trouble.STATUS
        error = UpstreamError(trouble, f"{self.name} answers with status {status}")
        if status in RETRIED_STATUS:
            raise _AgainError(error, retry_after_s(response.headers, longest_s=_LONGEST_PAUSE_S))
        raise error


async def ask_model(
    service: Upstream, model: str, task: str, material: object, *, max_tokens: int, seconds: float
) -> str:
    """Return the readable text of a model's reply, without its reasoning.

    Args:
        task: System message.
        material: Content of the user message, as text or parts.

    Raises:
        UpstreamError: The model did not answer within ``seconds``.
    """
    messages = [{"role": "system", "content": task}, {"role": "user", "content": material}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    text = _text(await service.ask("POST", "/chat/completions", body=body, seconds=seconds))
    if not text:
        raise UpstreamError(Trouble.BROKEN, f"the answer of {service.name} holds no text")
    return text


def _text(answer: Any) -> str:
    try:
        text = answer["choices"][0]["message"]["content"]
        return readable(without_reasoning(text)).strip() if isinstance(text, str) else ""
    except (KeyError, IndexError, TypeError, UnfinishedReasoningError):
        return ""
