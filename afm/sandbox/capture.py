"""What a run leaves behind: capped output, CPU time, and the anonymous files and pipes that carry them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from afm.sandbox.base import ExitReason

_CHUNK = 1 << 16


@dataclass(slots=True)
class Capture:
    """The first ``limit`` bytes of a stream; everything behind them is dropped."""

    fd: int
    limit: int
    data: bytearray = field(default_factory=bytearray)
    cut: bool = False
    open: bool = True

    def read(self) -> bool:
        """Take what is there; False when nothing more will come now."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.open = False
            return False
        room = self.limit - len(self.data)
        self.data += chunk[:room]
        self.cut = self.cut or len(chunk) > room
        return not self.cut

    def text(self) -> str:
        """Decoded as UTF-8, invalid bytes replaced; a character cut in two at the end is left out."""
        decoder = getincrementaldecoder("utf-8")("replace")
        return decoder.decode(bytes(self.data), final=not self.cut)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a jailed process ended.

    Attributes:
        reason: Why the host stopped it; ``None`` when it ended by itself.
        report: What the launcher wrote about the program inside.
        cpu_s: CPU time of the jail and everything in it.
        starved_s: As in :class:`afm.sandbox.base.RunResult`, and so is ``idle_s``.
        out_of_memory: Whether the kernel killed processes of the run to keep its memory limit.
    """

    stdout: Capture
    stderr: Capture
    report: str
    reason: ExitReason | None
    wall_s: float
    cpu_s: float
    out_of_memory: bool = False
    starved_s: float = 0.0
    idle_s: float = 0.0


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


def pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose reading end is ours and does not block."""
    reading, writing = os.pipe()
    ours.callback(os.close, reading)
    theirs.callback(os.close, writing)
    os.set_blocking(reading, False)
    return reading, writing


def drained(fd: int) -> str:
    """What is in a pipe now, at most 4 KiB."""
    try:
        return os.read(fd, 4096).decode("ascii", "replace")
    except BlockingIOError:
        return ""


def memory_file(name: str, data: bytes, close_with: Callable[[Callable[..., None], int], object]) -> int:
    """An anonymous file that holds ``data`` and can never change, positioned at its beginning."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    close_with(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sealed)
    return fd
