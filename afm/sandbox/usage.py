"""Resource use of a run's processes: limited and counted by cgroups or watched, and starvation by the machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from afm.sandbox.base import CPU_AS_FAR_AS_SEEN, MEMORY_PER_PROCESS

ROOT = Path("/sys/fs/cgroup")
_PREFIX = "afm-sandbox"
_NUMBERS = itertools.count()
_REMOVED = (errno.ENOENT, errno.ENODEV)
"""The kernel's errors for a removed group: before its file was opened, and after."""
_SLACK_BYTES = 64 << 20  # page tables, namespaces, copied pages of the zygote


@dataclass(frozen=True, slots=True)
class _Version:
    limit: str
    events: str
    swap: tuple[str, str]


_V1 = _Version("memory.limit_in_bytes", "memory.oom_control", ("memory.swappiness", "0"))
_V2 = _Version("memory.max", "memory.events", ("memory.swap.max", "0"))


class Cgroup:
    """One cgroup."""

    def __init__(self, parent: Path, name: str) -> None:
        self.path = parent / name
        # In version 2 the memory group already exists when the CPU group of the same run is made.
        with contextlib.suppress(FileExistsError):
            self.path.mkdir()

    def add(self, pid: int) -> None:
        """Add a process. Its later children belong to the group too."""
        # Its earlier children stay where they are, so this comes before the zygote's first run.
        (self.path / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def remove(self) -> None:
        """Remove the group if it is empty."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def number(self, file: str, pattern: str) -> int | None:
        """Return a number from one of the group's files, or ``None`` if the file or the number is missing."""
        try:
            text = (self.path / file).read_text(encoding="ascii")
        except OSError as error:
            if error.errno not in _REMOVED:
                raise
            return None
        match = re.search(pattern, text, flags=re.MULTILINE)
        return int(match[1]) if match else None


class MemoryGroup(Cgroup):
    """A cgroup that limits the memory of all its processes together.

    Raises:
        OSError: The cgroup cannot be made or used here.
    """

    def __init__(self, parent: Path, name: str) -> None:
        super().__init__(parent, name)
        self._limit = 0
        self._version = _V2 if (self.path / _V2.limit).exists() else _V1
        try:
            self.limit(1 << 30)
        except OSError:
            self.remove()
            raise
        # Without this, a run at its limit would swap and become slow instead of being killed.
        file, value = self._version.swap
        with contextlib.suppress(OSError):
            (self.path / file).write_text(value, encoding="ascii")

    @property
    def unified(self) -> bool:
        """Whether the cgroup is of version 2, where one cgroup has every controller."""
        return self._version is _V2

    def limit(self, size_bytes: int) -> None:
        """Limit the memory of the group, including files in its ``tmpfs``."""
        if size_bytes != self._limit:
            (self.path / self._version.limit).write_text(str(size_bytes), encoding="ascii")
            self._limit = size_bytes

    def kills(self) -> int:
        """Return how many processes the kernel killed in this group for lack of memory, 0 once it is removed."""
        return self.number(self._version.events, r"^oom_kill (\d+)$") or 0


class CpuGroup(Cgroup):
    """A cgroup that counts the CPU time of its processes, including those that no process waited for.

    In version 2 it may be the folder of a :class:`MemoryGroup`.

    Raises:
        OSError: The cgroup cannot be made or counts no CPU time.
    """

    def __init__(self, parent: Path, name: str) -> None:
        super().__init__(parent, name)
        self._place, self._per_s = ("cpu.stat", r"^usage_usec (\d+)$"), 1e6
        if (self.path / "cpuacct.usage").exists():  # version 1
            self._place, self._per_s = ("cpuacct.usage", r"(\d+)"), 1e9
        if self.number(*self._place) is None:
            self.remove()
            raise OSError(f"{self.path / self._place[0]} counts no CPU time")

    def used_s(self) -> float:
        """Return the CPU seconds of its processes so far, 0 once it is removed."""
        return (self.number(*self._place) or 0) / self._per_s


G = TypeVar("G", bound=Cgroup)


def group_limit(memory_bytes: int, file_bytes: int) -> int:
    """Return the memory limit in bytes of all processes of a run with ``/tmp`` and ``/dev/shm``."""
    return memory_bytes + 2 * file_bytes + _SLACK_BYTES


@dataclass(frozen=True, slots=True)
class RunGroups:
    """The cgroups of one run at a time, as far as they are available."""

    memory: MemoryGroup | None = None
    cpu: CpuGroup | None = None

    def add(self, pid: int) -> None:
        """Add a process. Its later children belong to the groups too."""
        for group in filter(None, (self.memory, self.cpu)):
            group.add(pid)

    def remove(self) -> None:
        """Remove the groups if they are empty."""
        for group in filter(None, (self.memory, self.cpu)):
            group.remove()


def run_groups(count: int, root: Path = ROOT) -> tuple[list[RunGroups], list[str]]:
    """Return the cgroups of ``count`` parallel runs, and sentences on what they limit and what stays unlimited."""
    memory, where = _groups(MemoryGroup, "memory", count, root)
    cpu, counted = cpu_groups(memory, count, root)
    nothing = [None] * count
    each = [RunGroups(*pair) for pair in zip(memory or nothing, cpu or nothing, strict=True)]
    bounded = f"memory cgroup below {where}"
    return each, [
        bounded if memory else f"no memory cgroup is writable{where}: {MEMORY_PER_PROCESS}",
        counted,
    ]


def cpu_groups(memory: Sequence[MemoryGroup], count: int, root: Path = ROOT) -> tuple[list[CpuGroup], str]:
    """Return CPU groups for ``count`` runs with these memory groups, if any, and a sentence on their place or absence."""
    if memory and memory[0].unified:  # a process is in one cgroup of version 2 only
        where = str(memory[0].path.parent)
        groups = [CpuGroup(group.path.parent, group.path.name) for group in memory]
    else:
        groups, where = _groups(CpuGroup, "cpuacct", count, root)
    if not groups:
        return [], f"no cgroup counts CPU time{where}: {CPU_AS_FAR_AS_SEEN}"
    return groups, f"CPU time is limited for the whole run: cgroup below {where}"


def _groups(make: Callable[[Path, str], G], controller: str, count: int, root: Path) -> tuple[list[G], str]:
    """Return ``count`` groups and their folder, or an empty list and the reason in parentheses."""
    trouble = ""
    for parent in _parents(root, controller, Path("/proc/self/cgroup").read_text(encoding="utf-8")):
        _remove_stale(parent)
        groups: list[G] = []
        try:
            groups.extend(make(parent, f"{_PREFIX}-{os.getpid()}-{next(_NUMBERS)}") for _ in range(count))
        except OSError as error:
            trouble = f" ({error})"
            for group in groups:
                group.remove()
            continue
        return groups, str(parent)
    return [], trouble


def _parents(root: Path, controller: str, memberships: str) -> list[Path]:
    """Return the writable folders for groups, the nearest first."""
    parents: list[Path] = []
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top = root / controller
        elif controllers == "" and (root / "cgroup.controllers").exists():
            top = root
        else:
            continue
        here = top / path.lstrip("/")
        # In a container the path from /proc may be missing below the mount, but one of its parents exists.
        while here != top and here.is_relative_to(top):
            parents.append(here)
            here = here.parent
        parents.append(top)
    return [folder for folder in parents if folder.is_dir() and os.access(folder, os.W_OK)]


def _remove_stale(parent: Path) -> None:
    """Remove the empty groups of owners that were killed."""
    for folder in parent.glob(f"{_PREFIX}-*-*"):
        owner = folder.name.split("-")[2]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


_SHORTEST_S = 0.1
_MORE_S = 1.0
"""Tolerance above a run's limit: the kernel, too, kills a process only one second after the signal to stop."""


class CpuWatch:
    """Ends a run whose processes together exceed the CPU limit.

    It only looks when they may have reached the limit, so that short runs cost nothing.

    Args:
        used_s: Returns the CPU seconds of the run so far.
        limit_s: The limit in CPU seconds.
        end: Called once, when the run exceeds the limit.
    """

    def __init__(self, used_s: Callable[[], float], limit_s: float, end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._used_s = used_s
        self._limit_s = limit_s + _MORE_S
        self._end = end
        self._timer = self._again(self._limit_s)

    def cancel(self) -> None:
        """Stop watching."""
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
    """Measures how long a run waited for a core, and how long it did not want one.

    It samples the run's threads. For each of them the kernel counts the time on a core and the time in a run queue.
    Competition between the run's own processes is not starvation. Waiting with a lowered priority is idleness. Between
    two samples, the thread that wanted a core the longest represents the run. The kernel counts a wait when it ends: a
    thread that is ready at two samples and did not compute has waited all the time between them. Time that looked idle
    before a wait was known is counted again, as starvation. If the kernel has no such counters, a run without a
    core is starved while the load of the machine exceeds its cores.

    Args:
        first_process: Returns process 1 of the run once it is known.
        wall_s: Time limit of the run, which sets the sampling interval.
    """

    def __init__(self, first_process: Callable[[], int | None], wall_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._first_process = first_process
        self._every_s = min(0.5, wall_s / 20)
        self._seen: dict[int, _Thread] = {}
        self._looked = time.monotonic()
        self.starved_s = 0.0
        self.idle_s = 0.0
        self._unclear_s = 0.0
        """Time up to the last sample that looked idle, and may be part of a wait."""
        self._timer = self._loop.call_later(self._every_s, self._again)

    def cancel(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def look(self) -> None:
        """Count the time since the last sample."""
        now, pid = time.monotonic(), self._first_process()
        passed_s, self._looked = now - self._looked, now
        threads = _threads(pid) if pid is not None else {}
        new = [thread.since(self._seen.get(tid), passed_s) for tid, thread in threads.items()]
        self._seen = threads
        got_s = sum(thread.cpu_s for thread in new)
        if _kernel_counts():
            wanted_s = max((thread.cpu_s + thread.wait_s for thread in new), default=0.0)
            late_s = min(
                max(0.0, wanted_s - got_s - passed_s), self._unclear_s
            )  # own threads may have had the core
            self.starved_s, self.idle_s = self.starved_s + late_s, self.idle_s - late_s
            self._unclear_s = self._unclear_s + passed_s if wanted_s == 0 else max(0.0, passed_s - wanted_s)
            wanted_s = min(passed_s, wanted_s)
        else:
            wanted_s = passed_s if os.getloadavg()[0] > (os.cpu_count() or 1) else min(passed_s, got_s)
        self.starved_s += max(0.0, wanted_s - got_s)
        self.idle_s += passed_s - wanted_s

    def _again(self) -> None:
        self.look()
        self._timer = self._loop.call_later(self._every_s, self._again)


@dataclass(frozen=True, slots=True)
class _Thread:
    """The seconds that a thread has computed and has waited for a core, without a wait that has not ended."""

    cpu_s: float
    wait_s: float
    ready: bool
    """Whether it computes or waits for a core now."""

    def since(self, before: _Thread | None, passed_s: float) -> _Thread:
        if before is None:
            return self
        if self == before and self.ready:  # it waits since some time between the last two samples, or longer
            return _Thread(0.0, 2 * passed_s, ready=True)
        return _Thread(self.cpu_s - before.cpu_s, self.wait_s - before.wait_s, self.ready)


def _threads(pid: int) -> dict[int, _Thread]:
    """Return all threads of a process and its descendants by id."""
    threads: dict[int, _Thread] = {}
    waiting, most_nice = [pid], os.getpriority(os.PRIO_PROCESS, 0)
    while waiting:
        tasks = Path("/proc") / str(waiting.pop()) / "task"
        try:
            for task in tasks.iterdir():
                threads[int(task.name)] = _thread(task, most_nice)
                waiting += map(int, (task / "children").read_text(encoding="ascii").split())
        except OSError:  # the process has ended
            continue
    return threads


def _thread(task: Path, most_nice: int) -> _Thread:
    """Return a thread's times from ``schedstat`` and its state, without its waiting if its priority is lowered.

    State, nice value and scheduling policy are the fields 3, 19 and 41 of ``stat``.
    """
    computed, waited, _ = map(int, (task / "schedstat").read_text(encoding="ascii").split())
    fields = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    lowered = int(fields[16]) > most_nice or int(fields[38]) in (os.SCHED_BATCH, os.SCHED_IDLE)
    return _Thread(computed / 1e9, 0.0 if lowered else waited / 1e9, fields[0] == "R" and not lowered)


@cache
def _kernel_counts() -> bool:
    """Return whether the kernel reports children and the time that threads wait for a core."""
    own = Path("/proc/thread-self")
    return (own / "schedstat").exists() and (own / "children").exists()


def tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds so far of a process, its descendants and the children that they waited for."""
    total = 0
    waiting = [pid]
    while waiting:
        folder = Path("/proc") / str(waiting.pop())
        try:
            fields = (
                (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            )
            children = (folder / "task" / folder.name / "children").read_text(encoding="ascii")
        except OSError:  # the process has ended, or the kernel does not list children
            continue
        total += sum(map(int, fields[11:15]))
        waiting += map(int, children.split())
    return total / os.sysconf("SC_CLK_TCK")
