"""A bounded queue: so many at work, so many waiting, everyone else is sent away at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class BusyError(Exception):
    """The queue is full, or the wait was too long.

    Attributes:
        retry_after_s: When to come back, whole seconds.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Admission:
    """Lets requests in, in the order in which they came.

    Args:
        parallel: Requests at work at the same time.
        waiting: Requests that may wait; further ones are refused.
        wait_s: The longest wait.
    """

    def __init__(self, parallel: int, waiting: int, wait_s: float) -> None:
        self._parallel = parallel
        self._most_waiting = waiting
        self._wait_s = wait_s
        self._slots = asyncio.Semaphore(parallel)
        self._typical_s = 0.1
        self.running = 0
        self.waiting = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place at work.

        Raises:
            BusyError: There is none.
        """
        if self._slots.locked() and self.waiting >= self._most_waiting:
            raise BusyError(f"{self.running} running, {self.waiting} waiting", self._retry_after_s())
        await self._slot()
        self.running += 1
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            self.running -= 1
            self._slots.release()
            self._typical_s += 0.1 * (loop.time() - began - self._typical_s)

    async def _slot(self) -> None:
        self.waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                await self._slots.acquire()
        except TimeoutError:
            message = f"waited {self._wait_s:g} s, {self.running} still running"
            raise BusyError(message, self._retry_after_s()) from None
        finally:
            self.waiting -= 1

    def _retry_after_s(self) -> int:
        """How long the queue needs to move by half, as far as past requests tell."""
        return max(1, min(30, math.ceil(self.waiting * self._typical_s / self._parallel / 2)))
