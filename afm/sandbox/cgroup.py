"""Memory cgroups: what stops several processes of one run from together taking too much memory."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from afm.sandbox.policy import MEMORY_PER_PROCESS

_PREFIX = "afm-sandbox"
_SLACK_BYTES = 64 << 20  # page tables, namespaces, copied pages of the zygote


@dataclass(frozen=True, slots=True)
class _Version:
    limit: str
    events: str
    swap: tuple[str, str]


_V1 = _Version("memory.limit_in_bytes", "memory.oom_control", ("memory.swappiness", "0"))
_V2 = _Version("memory.max", "memory.events", ("memory.swap.max", "0"))


class MemoryGroup:
    """One cgroup, whose processes together keep one limit.

    Raises:
        OSError: It cannot be made or used here.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self.path = parent / name
        self._limit = 0
        with contextlib.suppress(FileExistsError):
            self.path.mkdir()
        self._version = _V2 if (self.path / _V2.limit).exists() else _V1
        try:
            self.limit(1 << 30)
        except OSError:
            self.remove()
            raise
        file, value = self._version.swap
        with contextlib.suppress(OSError):
            (self.path / file).write_text(value, encoding="ascii")

    def add(self, pid: int) -> None:
        """Put a process in; what it forks from then on belongs to the group."""
        (self.path / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def limit(self, size_bytes: int) -> None:
        """Bound the memory of the group, files in its ``tmpfs`` included."""
        if size_bytes != self._limit:
            (self.path / self._version.limit).write_text(str(size_bytes), encoding="ascii")
            self._limit = size_bytes

    def kills(self) -> int:
        """Processes that the kernel has killed in this group for want of memory."""
        text = (self.path / self._version.events).read_text(encoding="ascii")
        found = re.search(r"^oom_kill (\d+)$", text, flags=re.MULTILINE)
        return int(found[1]) if found else 0

    def remove(self) -> None:
        """Remove the group, if it is empty."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


def group_limit(memory_bytes: int, file_bytes: int) -> int:
    """What all processes of a run, ``/tmp`` and ``/dev/shm`` may take together."""
    return memory_bytes + 2 * file_bytes + _SLACK_BYTES


def memory_groups(count: int, root: Path = Path("/sys/fs/cgroup")) -> tuple[list[MemoryGroup], str]:
    """Groups for ``count`` parallel runs, and where they are; or none, and why not."""
    trouble = "no memory cgroup is writable"
    for parent in _parents(root, Path("/proc/self/cgroup").read_text(encoding="utf-8")):
        _remove_stale(parent)
        groups: list[MemoryGroup] = []
        try:
            for number in range(count):
                group = MemoryGroup(parent, f"{_PREFIX}-{os.getpid()}-{number}")
                groups.append(group)
        except OSError as error:
            trouble = f"no memory cgroup is writable ({error})"
            for group in groups:
                group.remove()
            continue
        return groups, f"memory cgroup below {parent}"
    return [], f"{trouble}: {MEMORY_PER_PROCESS}"


def _parents(root: Path, memberships: str) -> list[Path]:
    """Folders in which a group could be made, the nearest first."""
    found: list[Path] = []
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            top = root / "memory"
        elif controllers == "" and (root / "cgroup.controllers").exists():
            top = root
        else:
            continue
        here = top / path.lstrip("/")
        while here != top and here.is_relative_to(top):
            found.append(here)
            here = here.parent
        found.append(top)
    return [folder for folder in found if folder.is_dir() and os.access(folder, os.W_OK)]


def _remove_stale(parent: Path) -> None:
    """Remove groups whose owner was killed; only empty ones can be removed."""
    for folder in parent.glob(f"{_PREFIX}-*-*"):
        owner = folder.name.split("-")[2]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
