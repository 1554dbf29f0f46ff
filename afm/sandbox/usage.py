"""What the processes of a run use: bounded and counted by cgroups, or watched, and whether the machine starves them."""

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
"""What the kernel answers for a removed group: before its file was opened, and after."""
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
        # A group of version 2 for memory is there already when its time is to be counted too.
        with contextlib.suppress(FileExistsError):
            self.path.mkdir()

    def add(self, pid: int) -> None:
        """Put a process in; what it forks from then on belongs to the group."""
        # What it forked before stays where it is, so this comes before the zygote serves its first run.
        (self.path / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def remove(self) -> None:
        """Remove the group, if it is empty."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def number(self, file: str, pattern: str) -> int | None:
        """A number in one of its files; ``None`` once the group is removed, or where it is absent."""
        try:
            text = (self.path / file).read_text(encoding="ascii")
        except OSError as error:
            if error.errno not in _REMOVED:
                raise
            return None
        match = re.search(pattern, text, flags=re.MULTILINE)
        return int(match[1]) if match else None


class MemoryGroup(Cgroup):
    """A cgroup whose processes together keep one limit.

    Raises:
        OSError: It cannot be made or used here.
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
        # Without this a run that is at its limit would swap, and be slow, in place of being killed.
        file, value = self._version.swap
        with contextlib.suppress(OSError):
            (self.path / file).write_text(value, encoding="ascii")

    @property
    def unified(self) -> bool:
        """Whether it is of version 2, where one cgroup serves for everything."""
        return self._version is _V2

    def limit(self, size_bytes: int) -> None:
        """Bound the memory of the group, files in its ``tmpfs`` included."""
        if size_bytes != self._limit:
            (self.path / self._version.limit).write_text(str(size_bytes), encoding="ascii")
            self._limit = size_bytes

    def kills(self) -> int:
        """Processes that the kernel has killed in this group for want of memory; 0 once it is removed."""
        return self.number(self._version.events, r"^oom_kill (\d+)$") or 0


class CpuGroup(Cgroup):
    """A cgroup that counts the CPU time of its processes, including those that no process waited for.

    With version 2 it may be the folder of a :class:`MemoryGroup`.

    Raises:
        OSError: It cannot be made, or does not count here.
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
        """CPU seconds that its processes have taken so far; 0 once it is removed."""
        return (self.number(*self._place) or 0) / self._per_s


G = TypeVar("G", bound=Cgroup)


def group_limit(memory_bytes: int, file_bytes: int) -> int:
    """What all processes of a run, ``/tmp`` and ``/dev/shm`` may take together."""
    return memory_bytes + 2 * file_bytes + _SLACK_BYTES


@dataclass(frozen=True, slots=True)
class RunGroups:
    """The cgroups of one run at a time, where they can be had."""

    memory: MemoryGroup | None = None
    cpu: CpuGroup | None = None

    def add(self, pid: int) -> None:
        """Put a process in; what it forks from then on belongs to them."""
        for group in filter(None, (self.memory, self.cpu)):
            group.add(pid)

    def remove(self) -> None:
        """Remove them, if they are empty."""
        for group in filter(None, (self.memory, self.cpu)):
            group.remove()


def run_groups(count: int, root: Path = ROOT) -> tuple[list[RunGroups], list[str]]:
    """Cgroups for ``count`` parallel runs; what is bounded by them, and what only without, in sentences."""
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
    """Groups for ``count`` runs that have these memory groups, if any; and where they are, or why they are missing."""
    if memory and memory[0].unified:  # a process is in one cgroup of version 2 only
        where = str(memory[0].path.parent)
        groups = [CpuGroup(group.path.parent, group.path.name) for group in memory]
    else:
        groups, where = _groups(CpuGroup, "cpuacct", count, root)
    if not groups:
        return [], f"no cgroup counts CPU time{where}: {CPU_AS_FAR_AS_SEEN}"
    return groups, f"CPU time is bounded for all of a run together: cgroup below {where}"


def _groups(make: Callable[[Path, str], G], controller: str, count: int, root: Path) -> tuple[list[G], str]:
    """``count`` groups and their folder; or none, and the reason in parentheses."""
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
    """Folders in which a group could be made, the nearest first."""
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
        # In a container the path that /proc names need not exist below the mount: then one of its parents does.
        while here != top and here.is_relative_to(top):
            parents.append(here)
            here = here.parent
        parents.append(top)
    return [folder for folder in parents if folder.is_dir() and os.access(folder, os.W_OK)]


def _remove_stale(parent: Path) -> None:
    """Remove groups whose owner was killed; only empty ones can be removed."""
    for folder in parent.glob(f"{_PREFIX}-*-*"):
        owner = folder.name.split("-")[2]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


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
