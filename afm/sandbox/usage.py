"""What is seen of a run while it lasts: the CPU time of its processes, and whether the machine starves it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SHORTEST_S = 0.1
_MORE_S = 1.0
"""What a run may take beyond its limit: a process, too, is killed only a second after its signal to stop."""


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


class StarvationWatch:
    """Counts how long a run waited for a core, and how long it did not want one.

    It looks at the run's threads from time to time: the kernel counts for each what it computed and how long it waited
    in a run queue. What a run's processes take from each other is no starvation, and what a thread waits after it has
    lowered its own priority is idleness. Between two looks, the thread that wanted a core the longest speaks for the run.
    Where the kernel does not count, a run without a core is starved if the machine has more to do than cores.

    Args:
        first_process: Process 1 of the run, once it is known.
        wall_s: Time limit of the run; how often to look depends on it.
    """

    def __init__(self, first_process: Callable[[], int | None], wall_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._first_process = first_process
        self._every_s = min(0.5, wall_s / 20)
        self._seen: dict[int, _Thread] = {}
        self._looked = time.monotonic()
        self.starved_s = 0.0
        self.idle_s = 0.0
        self._timer = self._loop.call_later(self._every_s, self._again)

    def cancel(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def look(self) -> None:
        """Count the time since the last look."""
        now, pid = time.monotonic(), self._first_process()
        passed_s, self._looked = now - self._looked, now
        threads = _threads(pid) if pid is not None else {}
        new = [thread.since(self._seen.get(tid)) for tid, thread in threads.items()]
        self._seen = threads
        got_s = sum(thread.cpu_s for thread in new)
        if _kernel_counts():
            wanted_s = min(passed_s, max((thread.cpu_s + thread.wait_s for thread in new), default=0.0))
        else:
            wanted_s = passed_s if os.getloadavg()[0] > (os.cpu_count() or 1) else min(passed_s, got_s)
        self.starved_s += max(0.0, wanted_s - got_s)
        self.idle_s += passed_s - wanted_s

    def _again(self) -> None:
        self.look()
        self._timer = self._loop.call_later(self._every_s, self._again)


@dataclass(frozen=True, slots=True)
class _Thread:
    """What a thread has computed, and how long it has waited for a core."""

    cpu_s: float
    wait_s: float

    def since(self, before: _Thread | None) -> _Thread:
        if before is None:
            return self
        return _Thread(self.cpu_s - before.cpu_s, self.wait_s - before.wait_s)


def _threads(pid: int) -> dict[int, _Thread]:
    """All threads of a process and its descendants, by id."""
    threads: dict[int, _Thread] = {}
    waiting, most_nice = [pid], os.getpriority(os.PRIO_PROCESS, 0)
    while waiting:
        tasks = Path("/proc") / str(waiting.pop()) / "task"
        try:
            for task in tasks.iterdir():
                threads[int(task.name)] = _thread(task, most_nice)
                waiting += map(int, (task / "children").read_text(encoding="ascii").split())
        except OSError:  # gone meanwhile
            continue
    return threads


def _thread(task: Path, most_nice: int) -> _Thread:
    """Its times by ``schedstat``; it waits for nothing while its priority (``stat``, fields 19 and 41) is a low one."""
    computed, waited, _ = map(int, (task / "schedstat").read_text(encoding="ascii").split())
    fields = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    lowered = int(fields[16]) > most_nice or int(fields[38]) in (os.SCHED_BATCH, os.SCHED_IDLE)
    return _Thread(computed / 1e9, 0.0 if lowered else waited / 1e9)


@cache
def _kernel_counts() -> bool:
    """Whether the kernel shows children and the time that threads wait for a core."""
    own = Path("/proc/thread-self")
    return (own / "schedstat").exists() and (own / "children").exists()


def tree_cpu_s(pid: int) -> float:
    """CPU time so far of a process, its descendants, and those they have waited for."""
    total = 0
    waiting = [pid]
    while waiting:
        folder = Path("/proc") / str(waiting.pop())
        try:
            fields = (
                (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            )
            children = (folder / "task" / folder.name / "children").read_text(encoding="ascii")
        except OSError:  # gone meanwhile, or a kernel that does not list children
            continue
        total += sum(map(int, fields[11:15]))
        waiting += map(int, children.split())
    return total / os.sysconf("SC_CLK_TCK")
