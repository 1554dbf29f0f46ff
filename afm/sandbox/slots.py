"""First-come, first-served queues for a fixed number of places and for the cores of this process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import cache
from typing import Generic, TypeVar

from afm.errors import SandboxBusyError

T = TypeVar("T")


class Slots(Generic[T]):
    """Hands out ``items``. Callers from any event loop wait while all are taken.

    Args:
        max_waiting: Callers that may wait at the same time. Further ones are refused.
    """

    def __init__(self, items: Iterable[T], max_waiting: int) -> None:
        self._free = list(items)
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[T]]] = deque()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """The number of callers in the queue."""
        return len(self._waiting)

    async def acquire(self) -> T:
        """Return the next free item.

        Raises:
            SandboxBusyError: ``max_waiting`` callers are waiting.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free:
                return self._free.pop()  # the last one used is the warmest
            if len(self._waiting) >= self._max_waiting:
                raise SandboxBusyError(
                    f"{len(self._waiting)} runs are waiting, expected at most {self._max_waiting} "
                    "(max_waiting); try again later or raise max_waiting"
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
        """Return an item to the queue."""
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


class Cores:
    """The cores of this process, shared by all its sandboxes that do not set ``max_parallel``.

    Otherwise a tool and a reward with their own sandboxes would start twice as many programs as there are cores, and the
    clock would stop programs that stay within their CPU limits.

    Args:
        count: The number of cores.
    """

    def __init__(self, count: int) -> None:
        self._slots = Slots(range(count), 1 << 30)
        self._holders: dict[int, tuple[asyncio.AbstractEventLoop, object]] = {}

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold a core for the block, after waiting until one is free."""
        self._reclaim()
        core, token = await self._slots.acquire(), object()
        self._holders[core] = (asyncio.get_running_loop(), token)
        try:
            yield
        finally:
            self._give_back(core, token)

    def _reclaim(self) -> None:
        """Free the cores whose event loop was closed in the middle of a run."""
        for core, (loop, token) in tuple(self._holders.items()):
            if loop.is_closed():
                self._give_back(core, token)

    def _give_back(self, core: int, token: object) -> None:
        if self._holders.get(core, (None, None))[1] is token:
            del self._holders[core]
            self._slots.release(core)


_SHARE = {"processes": 1}


def share_cores(processes: int) -> None:
    """Set how many processes of this machine share its cores. It applies to the sandboxes made afterwards."""
    _SHARE["processes"] = max(1, processes)


def own_cores() -> int:
    """Return how many cores the sandboxes of this process may use, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // _SHARE["processes"])


@asynccontextmanager
async def hold_core(max_parallel: int | None) -> AsyncIterator[None]:
    """Hold one of this process's cores for the block, unless the sandbox sets ``max_parallel``."""
    if max_parallel is not None:
        yield
        return
    async with _cores(os.getpid(), own_cores()).hold():
        yield


@cache
def _cores(process: int, count: int) -> Cores:
    """Return the cores of a process. Its id is an argument because a fork has its own."""
    return Cores(count)
