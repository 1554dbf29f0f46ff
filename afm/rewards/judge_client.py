"""Verdicts from an OpenAI-compatible chat endpoint: bounded, repeated when it fails, cached, within a budget."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from afm.errors import ConfigError, RewardError
from afm.rewards.judge_prompt import Case, Ruling, messages, read_ruling
from afm.rewards.judge_store import Ledger, VerdictCache, cache_key

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_CONNECT_TIMEOUT_S = 10.0
_LONGEST_REPLY = 1 << 20
_LONGEST_PAUSE_S = 60.0
_CHARS_PER_TOKEN = 3
_MOST_TOKENS = 10_000_000  # of one request; more is a mistake of the server's
_SHOWN = 200
_jitter = wait_random_exponential(multiplier=0.25, max=20)


class _TryAgainError(Exception):
    """A failure that may pass by itself.

    Attributes:
        wait_s: The server asked for this pause.
    """

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(slots=True)
class _Loop:
    """What belongs to one event loop."""

    client: httpx.AsyncClient
    free: asyncio.Semaphore
    asked: dict[str, asyncio.Task[Ruling]] = field(default_factory=dict)


class JudgeClient:
    """Asks one model for verdicts. Equal requests at the same time are sent once.

    Args:
        url: Of the server, up to ``/v1``.
        request: The request's fields beside ``messages``: model, temperature, response format.
        api_key: Sent in the header ``Authorization`` and nowhere else.
        max_parallel: Requests in flight.
        attempts: How often a request is sent when the server fails or replies with no verdict.
        timeout_s: For one request with its whole reply.

    Raises:
        ConfigError: The key cannot be sent in a header.
    """

    def __init__(
        self,
        url: str,
        request: Mapping[str, Any],
        ledger: Ledger,
        cache: VerdictCache | None = None,
        *,
        api_key: str | None = None,
        max_parallel: int = 16,
        attempts: int = 5,
        timeout_s: float = 60.0,
    ) -> None:
        if api_key is not None and not (
            api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key
        ):
            raise ConfigError("GRM_API_KEY: expected printable ASCII without blanks around it")
        self._where = f"{url}/chat/completions"
        self._request = dict(request)
        self._ledger = ledger
        self._cache = cache
        self._api_key = api_key
        self._max_parallel = max_parallel
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = WeakKeyDictionary()

    async def ruling(self, case: Case) -> Ruling:
        """The model's verdict.

        Raises:
            RewardError: There is none: the server failed, replied with something else, or the budget is spent.
        """
        body = self._request | {"messages": messages(case)}
        key = cache_key(self._where, body)
        loop = self._loop()
        task = loop.asked.get(key)
        if task is None:
            task = asyncio.create_task(self._found_or_asked(key, body, case))
            loop.asked[key] = task
            task.add_done_callback(lambda done: _forget(loop, key, done))
        # One waiter that is cancelled takes nothing from the others.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End what this event loop asked for and close its connections."""
        state = self._loops.pop(asyncio.get_running_loop(), None)
        if state is not None:
            asked = tuple(state.asked.values())
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await state.client.aclose()
        self._ledger.close()
        if self._cache is not None:
            self._cache.close()

    def _loop(self) -> _Loop:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            headers = {"Accept-Encoding": "identity"}  # a little compressed text can become endless
            if self._api_key:
                headers["Authorization"] = f"Bearer {self._api_key}"
            limits = httpx.Limits(max_connections=self._max_parallel)
            timeout = httpx.Timeout(self._timeout_s, connect=min(self._timeout_s, _CONNECT_TIMEOUT_S))
            client = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits)
            self._loops[loop] = _Loop(client, asyncio.Semaphore(self._max_parallel))
        return self._loops[loop]

    async def _found_or_asked(self, key: str, body: Mapping[str, Any], case: Case) -> Ruling:
        found = await self._cache.find(key) if self._cache is not None else None
        if found is not None:
            return found
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._attempts),
            wait=_pause_s,
            retry=retry_if_exception_type(_TryAgainError),
            reraise=True,
        )
        try:
            ruling: Ruling = await retrying(self._once, body, case)
        except _TryAgainError as error:
            raise RewardError(f"{self._where}: {error} (after {self._attempts} attempts)") from None
        if self._cache is not None:
            await self._cache.add(key, ruling)
        return ruling

    async def _once(self, body: Mapping[str, Any], case: Case) -> Ruling:
        loop = self._loop()
        expected = sum(len(message["content"]) for message in body["messages"]) // _CHARS_PER_TOKEN
        expected += int(body.get("max_tokens") or body.get("max_completion_tokens") or 0)
        used = 0
        async with loop.free:
            await self._ledger.reserve(expected)
            try:
                text, told = _reply(await self._posted(loop.client, body))
                used = expected if told is None else told
            finally:
                await self._ledger.settle(expected, used)
        try:
            return read_ruling(text, case)
        except ValueError as error:
            raise _TryAgainError(f"no verdict: {error}") from None

    async def _posted(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> bytes:
        """The body of the reply."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                client.stream("POST", self._where, json=body) as response,
            ):
                data = await _read(response)
        except TimeoutError:
            raise _TryAgainError(f"ReadTimeout: no whole reply within {self._timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise _TryAgainError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        if response.status_code in _RETRIED:
            raise _TryAgainError(self._told(response.status_code, data), _retry_after_s(response))
        if not response.is_success:
            raise RewardError(f"{self._where}: {self._told(response.status_code, data)}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise _TryAgainError("the reply is compressed, though the request forbids it")
        return data

    def _told(self, status: int, data: bytes) -> str:
        text = " ".join(data.decode("utf-8", "replace").split())
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return f"status {status}: {text[:_SHOWN] or 'no text'}"


async def _read(response: httpx.Response) -> bytes:
    data = bytearray()
    async for chunk in response.aiter_raw():
        data += chunk
        if len(data) > _LONGEST_REPLY:
            raise _TryAgainError("the reply is too long")
    return bytes(data)


def _forget(loop: _Loop, key: str, task: asyncio.Task[Ruling]) -> None:
    loop.asked.pop(key, None)
    if not task.cancelled():
        task.exception()  # every waiter may be gone


def _reply(body: bytes) -> tuple[str, int | None]:
    """The text of a complete reply, and the tokens used if the server tells.

    Raises:
        _TryAgainError: There is no complete reply.
    """
    try:
        data = json.loads(body)
        [choice] = data["choices"]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
        used = (data.get("usage") or {}).get("total_tokens")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _TryAgainError("the answer is no chat completion") from None
    if not isinstance(text, str) or finish not in ("stop", None):
        raise _TryAgainError(f"the reply is incomplete (finish reason {str(finish)[:40]!r})")
    return text, used if isinstance(used, int) and 0 <= used <= _MOST_TOKENS else None


def _pause_s(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    asked_s = error.wait_s if isinstance(error, _TryAgainError) else 0.0
    return asked_s + _jitter(state)


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return min(_LONGEST_PAUSE_S, max(0.0, float(response.headers.get("Retry-After", "0"))))
    except ValueError:
        return 0.0
