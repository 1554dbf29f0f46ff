"""Tokens from an engine's thread to somebody in an event loop, who may be slower than the engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

_AT_A_TIME = 16

T = TypeVar("T")


class TokenFeed:
    """Calls ``on_token`` in the event loop that made this, a few tokens at a time: between them the loop does other work.

    A queued call for each token would hold up everything behind it, a cancelled request too, until the last is shown.
    """

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token = on_token
        self._loop = asyncio.get_running_loop()
        self._tokens: deque[int] = deque()
        self._planned = False

    def put(self, token: int) -> None:
        """Take a token, in the engine's thread."""
        self._tokens.append(token)
        if not self._planned and not self._loop.is_closed():
            self._planned = True
            self._loop.call_soon_threadsafe(self._hand_on)

    async def until(self, done: Awaitable[T]) -> T:
        """What ``done`` gives, after all its tokens; those left of one that fails or is cancelled are forgotten."""
        try:
            result = await done
        except BaseException:
            self._on_token = _forget
            raise
        while self._tokens:
            self._on_token(self._tokens.popleft())
        return result

    def _hand_on(self) -> None:
        for _ in range(min(_AT_A_TIME, len(self._tokens))):
            self._on_token(self._tokens.popleft())
        self._planned = False
        if (
            self._tokens
        ):  # perhaps planned by the engine's thread, too, since the line above: that does no harm
            self._planned = True
            self._loop.call_soon(self._hand_on)


def _forget(token: int) -> None:
    """Nobody asks for it any more."""
