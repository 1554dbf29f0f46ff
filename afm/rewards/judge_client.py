"""Verdicts from an OpenAI-compatible chat endpoint: bounded, repeated when it fails, cached, within a budget."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from afm.errors import EngineError, RewardError
from afm.models.chat import ChatEndpoint, expected_tokens
from afm.models.retrying import TryAgainError, persistently
from afm.rewards.judge_prompt import Case, Ruling, messages, read_ruling
from afm.rewards.judge_store import Ledger, VerdictCache, cache_key

_Asked = dict[str, asyncio.Task[Ruling]]


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
        self._endpoint = ChatEndpoint(
            url, api_key=api_key, key_name="GRM_API_KEY", max_parallel=max_parallel, timeout_s=timeout_s
        )
        self._request = dict(request)
        self._ledger = ledger
        self._cache = cache
        self._attempts = attempts
        self._asked: WeakKeyDictionary[asyncio.AbstractEventLoop, _Asked] = WeakKeyDictionary()

    async def ruling(self, case: Case) -> Ruling:
        """The model's verdict.

        Raises:
            RewardError: There is none: the server failed, replied with something else, or the budget is spent.
        """
        body = self._request | {"messages": messages(case)}
        key = cache_key(self._endpoint.where, body)
        asked = self._asked.setdefault(asyncio.get_running_loop(), {})
        task = asked.get(key)
        if task is None:
            task = asyncio.create_task(self._found_or_asked(key, body, case))
            asked[key] = task
            task.add_done_callback(lambda done: _forget(asked, key, done))
        # One waiter that is cancelled takes nothing from the others.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End what this event loop asked for and close its connections."""
        asked = tuple(self._asked.pop(asyncio.get_running_loop(), {}).values())
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await self._endpoint.close()
        self._ledger.close()
        if self._cache is not None:
            self._cache.close()

    async def _found_or_asked(self, key: str, body: Mapping[str, Any], case: Case) -> Ruling:
        found = await self._cache.find(key) if self._cache is not None else None
        if found is not None:
            return found
        try:
            ruling = await persistently(self._attempts, lambda: self._once(body, case))
        except TryAgainError as error:
            message = f"{self._endpoint.where}: {error} (after {self._attempts} attempts)"
            raise RewardError(message) from None
        except EngineError as error:
            raise RewardError(str(error)) from None
        if self._cache is not None:
            await self._cache.add(key, ruling)
        return ruling

    async def _once(self, body: Mapping[str, Any], case: Case) -> Ruling:
        expected = sum(expected_tokens(body))
        used = 0
        async with self._endpoint.place() as client:
            await self._ledger.reserve(expected)
            try:
                reply = await self._endpoint.ask(client, body)
                used = expected if reply.total_tokens is None else reply.total_tokens
            finally:
                await self._ledger.settle(expected, used)
        try:
            return read_ruling(reply.text, case)
        except ValueError as error:
            raise TryAgainError(f"no verdict: {error}") from None


def _forget(asked: _Asked, key: str, task: asyncio.Task[Ruling]) -> None:
    asked.pop(key, None)
    if not task.cancelled():
        task.exception()  # every waiter may be gone
