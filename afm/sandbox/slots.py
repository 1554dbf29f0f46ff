"""Who may run next: a first-come, first-served queue in front of a fixed number of places."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from afm.errors import SandboxBusyError

T = TypeVar("T")


class Slots(Generic[T]):
    """Hands out ``items``; callers wait while there is none, from whatever event loop.

    Args:
        max_waiting: Callers that may wait at the same time; further ones are turned away.
    """

    def __init__(self, items: Iterable[T], max_waiting: int) -> None:
        self._free = list(items)
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[T]]] = deque()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Callers in the queue."""
        return len(self._waiting)

    async def acquire(self) -> T:
        """The next free item.

        Raises:
            SandboxBusyError: ``max_waiting`` callers wait already.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free:
                return self._free.pop()  # the one used last is the warmest
            if len(self._waiting) >= self._max_waiting:
                raise SandboxBusyError(
                    f"{len(self._waiting)} runs wait already, expected at most {self._max_waiting} "
                    "(max_waiting); try again later or raise it"
                )
            future: asyncio.Future[T] = loop.create_future()
            entry = (loop, future)
            self._waiting.append(entry)
        try:
            return await future
        except asyncio.CancelledError:
            with self._lock:
                if entry in self._waiting:
                    self._waiting.remove(entry)
            if future.done() and not future.cancelled():
                self.release(future.result())
            raise

    def release(self, item: T) -> None:
        """Give an item back."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._free.append(item)
                    return
                loop, future = self._waiting.popleft()
            if loop is _running_loop():
                if not future.done():
                    future.set_result(item)
                    return
                continue
            try:
                loop.call_soon_threadsafe(self._give, future, item)
            except RuntimeError:  # that loop is closed
                continue
            return

    def _give(self, future: asyncio.Future[T], item: T) -> None:
        if future.done():
            self.release(item)
        else:
            future.set_result(item)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
