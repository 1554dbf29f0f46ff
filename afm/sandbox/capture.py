"""What is seen of a run: capped output, CPU time, starvation, the end and the result made of it.

Also the anonymous files and pipes that carry data into a jail and out of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import time
from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from afm.errors import SandboxError
from afm.sandbox.base import ExitReason, RunResult, SandboxLimits

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
    """Counts how long a run wanted a core and had none, and how long it did not want one.

    It looks at the run's threads from time to time: the kernel counts for each what it computed and how long it waited
    in a run queue. What a run's processes take from each other is no starvation, and what a thread waits after it has
    lowered its own priority is idleness. Between two looks, the thread that wanted a core the longest speaks for the run.
    Where the kernel does not count, a run without a core is starved if the machine has more to do than cores.

    Args:
        process_one: Process 1 of the run, once it is known.
        wall_s: Time limit of the run; how often to look depends on it.
    """

    def __init__(self, process_one: Callable[[], int | None], wall_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._process_one = process_one
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
        now, pid = time.monotonic(), self._process_one()
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


_SAME = 0.5  # the kernel counts whole clock ticks for its limit, which on a busy machine are more than the time it reports


def outcome(ended: Ended, limits: SandboxLimits) -> RunResult:
    """The result of a run.

    Raises:
        SandboxError: The jail did not get as far as running the program.
    """
    lines = ended.report.split("\n")
    if lines[0] != "ready":
        if ended.reason is ExitReason.KILLED:
            return _as_result(ended, ExitReason.KILLED, None, None)
        message = (ended.report.removeprefix("failed: ") or ended.stderr.text()).strip()[-500:]
        if ended.reason is ExitReason.TIMEOUT:
            message = "it took too long; is this machine overloaded?"
        raise SandboxError(f"the jail did not start: {message or 'no message'}")
    status, peak = _parsed(lines[1:])
    if ended.reason is not None:
        return _as_result(ended, ended.reason, None, peak)
    if ended.out_of_memory and status != 0:
        return _as_result(ended, ExitReason.MEMORY, None, peak)
    if status is None:
        return _as_result(ended, ExitReason.KILLED, None, None)
    computed = ended.cpu_s >= _SAME * limits.cpu_s
    if computed and status in (-signal.SIGXCPU, -signal.SIGKILL):  # a program can send itself either
        return _as_result(ended, ExitReason.CPU, None, peak)
    if status == -signal.SIGKILL:
        return _as_result(ended, ExitReason.KILLED, status, peak)
    if status == 1 and "memory" in lines:
        return _as_result(ended, ExitReason.MEMORY, None, peak)
    return _as_result(ended, ExitReason.OK if status == 0 else ExitReason.ERROR, status, peak)


def _parsed(lines: list[str]) -> tuple[int | None, int | None]:
    """Exit status and peak memory in bytes from the launcher's report; ``None`` when it did not get that far."""
    try:
        wait_status, peak_kib = (int(word) for word in lines[0].split()[:2])
        return os.waitstatus_to_exitcode(wait_status), peak_kib * 1024
    except (IndexError, ValueError):
        return None, None


def _as_result(ended: Ended, reason: ExitReason, status: int | None, peak: int | None) -> RunResult:
    return RunResult(
        stdout=ended.stdout.text(),
        stderr=ended.stderr.text(),
        exit_status=status,
        reason=reason,
        wall_s=ended.wall_s,
        cpu_s=ended.cpu_s,
        peak_memory_bytes=peak,
        stdout_cut=ended.stdout.cut,
        stderr_cut=ended.stderr.cut,
        starved_s=ended.starved_s,
        idle_s=ended.idle_s,
    )
