"""Cgroups: what bounds the memory, and counts the CPU time, of all processes of one run together."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
