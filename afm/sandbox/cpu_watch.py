"""Bounds the CPU time of a whole run; the kernel itself bounds that of each process only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

_SHORTEST_S = 0.1
_MORE_S = 1.0
"""What a run may take beyond its limit: a process, too, is killed only a second after it was told to stop."""


class CpuWatch:
    """Ends a run whose processes have together computed too long.

    It looks only when they can have reached the limit, and therefore costs short runs nothing.

    Args:
        used_s: CPU seconds that the run has taken so far.
        limit_s: What it may take.
        end: Called once, when it has taken more.
    """

    def __init__(self, used_s: Callable[[], float], limit_s: float, end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._used_s = used_s
        self._limit_s = limit_s + _MORE_S
        self._end = end
        self._timer = self._again(self._limit_s)

    def cancel(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _again(self, left_s: float) -> asyncio.TimerHandle:
        return self._loop.call_later(max(left_s / (os.cpu_count() or 1), _SHORTEST_S), self._look)

    def _look(self) -> None:
        left_s = self._limit_s - self._used_s()
        if left_s <= 0:
            self._end()
        else:
            self._timer = self._again(left_s)
