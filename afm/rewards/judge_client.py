"""Verdicts on answers, cached and shared by those who ask the same at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from afm.rewards.judge_prompt import Case, Ruling, messages, read_ruling
from afm.rewards.judge_store import VerdictCache, cache_key
from afm.rewards.judge_text import JudgeText
from afm.rewards.reply_client import ReplyClient

_Asked = dict[str, asyncio.Task[Ruling]]


class JudgeClient:
    """Asks one model for verdicts, in our words or those of ``text``. Equal requests at the same time are sent once."""

    def __init__(
        self, client: ReplyClient, cache: VerdictCache | None = None, text: JudgeText | None = None
    ) -> None:
        self._client = client
        self._cache = cache
        self._messages = messages if text is None else text.messages
        self._read = read_ruling if text is None else text.read
        self._asked: WeakKeyDictionary[asyncio.AbstractEventLoop, _Asked] = WeakKeyDictionary()

    async def ruling(self, case: Case) -> Ruling:
        """The model's verdict.

        Raises:
            RewardError: There is none: the server failed, replied with something else, or the budget is spent.
        """
        body = self._client.body(self._messages(case))
        key = cache_key(self._client.where, body)
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
        await self._client.close()
        if self._cache is not None:
            self._cache.close()

    async def _found_or_asked(self, key: str, body: Mapping[str, Any], case: Case) -> Ruling:
        found = await self._cache.find(key) if self._cache is not None else None
        if found is not None:
            return found
        ruling = await self._client.reply(body, lambda text: self._read(text, case))
        if self._cache is not None:
            await self._cache.add(key, ruling)
        return ruling


def _forget(asked: _Asked, key: str, task: asyncio.Task[Ruling]) -> None:
    asked.pop(key, None)
    if not task.cancelled():
        task.exception()  # every waiter may be gone
