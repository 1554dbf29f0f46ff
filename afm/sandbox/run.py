"""One run on the event loop: its input and output, its clock, its end and its result.

Nothing here blocks the event loop: pipes are read when they have data, and a pidfd signals the end of a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import time
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import dataclass, field

from afm.errors import DataError, SandboxError
from afm.sandbox.base import NO_ISOLATION, ExitReason, NamelessInput, RunResult, SandboxLimits
from afm.sandbox.usage import CpuWatch, StarvationWatch, tree_cpu_s

_CHUNK = 1 << 16
# The kernel counts whole clock ticks towards its limit, which on a busy machine exceed the time it reports.
_NEAR_CPU_LIMIT = 0.5


@dataclass(frozen=True, slots=True)
class RunTask:
    """A program to run. ``/dev/stdin`` is its standard input if ``stdin_named`` is set, else empty."""

    program: bytes
    stdin: bytes
    limits: SandboxLimits
    stdin_named: bool = True

    @classmethod
    def from_texts(cls, code: str, stdin: str, limits: SandboxLimits) -> RunTask:
        """Return the task for these texts.

        Raises:
            DataError: A text is longer than the limits allow.
        """
        program = _encode("the program", code, limits.file_bytes)
        data = _encode("stdin", stdin, limits.stdin_bytes)
        return cls(program, data, limits, not isinstance(stdin, NamelessInput))


def _encode(what: str, text: str, limit: int) -> bytes:
    data = text.encode("utf-8", "replace")
    if len(data) > limit:
        raise DataError(f"{what} is {len(data)} bytes long, expected at most {limit}")
    return data


@dataclass(slots=True)
class Capture:
    """The first ``limit`` bytes of a stream. Everything after them is dropped."""

    fd: int
    limit: int
    data: bytearray = field(default_factory=bytearray)
    cut: bool = False
    open: bool = True

    def read(self) -> bool:
        """Read the available bytes and return whether more may be available now."""
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
        """Return the bytes decoded as UTF-8 with invalid ones replaced, without an incomplete last character."""
        decoder = getincrementaldecoder("utf-8")("replace")
        return decoder.decode(bytes(self.data), final=not self.cut)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a run, as seen from outside.

    Attributes:
        report: The launcher's report on the program inside.
        reason: Why the host stopped the run, or ``None`` if it ended by itself.
        cpu_s: CPU seconds of the jail and everything in it.
        out_of_memory: Whether the kernel killed processes of the run to keep its memory limit.
        starved_s: As in :class:`afm.sandbox.base.RunResult`, like ``idle_s``.
    """

    stdout: Capture
    stderr: Capture
    report: str
    reason: ExitReason | None
    wall_s: float
    cpu_s: float
    starved_s: float
    idle_s: float
    out_of_memory: bool = False


class JailRun(ABC):
    """Follows a run to its end. It consists of callbacks, because a task could be cancelled halfway.

    Args:
        limits: The limits, of which this class enforces output, wall-clock time and CPU time.
    """

    def __init__(self, limits: SandboxLimits) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        self._limits = limits
        self._reason: ExitReason | None = None
        self._pidfd: int | None = None
        self._beginning = ""
        self._timers: list[asyncio.TimerHandle] = []
        self._cpu_watch: CpuWatch | None = None
        self._starvation: StarvationWatch | None = None
        self._stopped_cpu_s = 0.0
        self._fds = contextlib.ExitStack()
        self._started = time.monotonic()

    @abstractmethod
    def _first_process(self) -> int | None:
        """Return process 1 of the run once it is known."""

    @abstractmethod
    def _kill(self) -> None:
        """Kill every process of the run."""

    @abstractmethod
    def _finish(self) -> None:
        """Conclude the run. Called when the process of the pidfd has ended."""

    async def wait(self) -> Ended:
        """Wait until every process of the run is gone. Cancelling kills them and waits for their death."""
        try:
            return await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self.stop(ExitReason.KILLED)
            await asyncio.wait([self._ended])
            if not self._ended.cancelled():
                self._ended.exception()  # otherwise asyncio warns that it was never retrieved
            raise

    def stop(self, reason: ExitReason) -> None:
        """Kill everything in the run. Only the first reason counts."""
        if self._reason is None and not self._ended.done():
            self._reason = reason
            if self._pidfd is not None:
                self._end_now()

    def _open_pipes(self, theirs: contextlib.ExitStack) -> tuple[int, int, int]:
        """Return the writing ends for stdout, stderr and the report. ``theirs`` closes them."""
        with contextlib.ExitStack() as ours:
            out, out_end = open_pipe(ours, theirs)
            err, err_end = open_pipe(ours, theirs)
            self._report, report_end = open_pipe(ours, theirs)
            self._fds.push(ours.pop_all())
        self._stdout = Capture(out, self._limits.output_bytes)
        self._stderr = Capture(err, self._limits.output_bytes)
        return out_end, err_end, report_end

    def _watch_pipes(self) -> None:
        self._loop.add_reader(self._report, self._begin)
        for stream in (self._stdout, self._stderr):
            self._loop.add_reader(stream.fd, self._take, stream)

    def _watch_process(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._fds.callback(os.close, pidfd)
        self._loop.add_reader(pidfd, self._finish)
        if self._reason is not None:  # stopped before the process existed
            self._end_now()

    def _end_now(self) -> None:
        self._cancel_timers()
        if self._first_process() is not None:
            self._stopped_cpu_s = (
                self._used_s()
            )  # the kernel drops the time of processes that nothing waited for
        if self._starvation is not None:
            self._starvation.look()
        self._kill()

    def _begin(self) -> None:
        """Start the clock, once the program is about to run. The start of the jail does not count."""
        self._loop.remove_reader(self._report)
        self._beginning = read_pipe(self._report)
        if self._reason is None and self._beginning.startswith("ready"):
            self._cancel_timers()
            self._after(self._limits.wall_s, self.stop, ExitReason.TIMEOUT)
            self._cpu_watch = CpuWatch(self._used_s, self._limits.cpu_s, lambda: self.stop(ExitReason.CPU))
            self._starvation = StarvationWatch(self._first_process, self._limits.wall_s)

    def _used_s(self) -> float:
        """Return the CPU seconds of the processes that are alive or were waited for."""
        pid = self._first_process()
        return tree_cpu_s(pid) if pid is not None else 0.0

    def _after(self, seconds: float, action: Callable[..., object], *arguments: object) -> None:
        self._timers.append(self._loop.call_later(seconds, action, *arguments))

    def _cancel_timers(self) -> None:
        while self._timers:
            self._timers.pop().cancel()
        for watch in (self._cpu_watch, self._starvation):
            if watch is not None:
                watch.cancel()

    def _take(self, stream: Capture) -> None:
        more = stream.read()
        if stream.cut:
            self.stop(ExitReason.OUTPUT)
        if not more and (stream.cut or not stream.open):
            self._loop.remove_reader(stream.fd)

    def _read_rest(self) -> str:
        """Read the rest of the pipes after all processes are gone and return the whole report."""
        for stream in (self._stdout, self._stderr):  # this ends because every writer is dead
            while not stream.cut and stream.read():
                pass
        if self._stdout.cut or self._stderr.cut:
            self._reason = self._reason or ExitReason.OUTPUT
        return self._beginning + read_pipe(self._report)

    def _conclude(self, report: str, cpu_s: float) -> None:
        self._release()
        self._ended.set_result(
            Ended(
                self._stdout,
                self._stderr,
                report,
                self._reason,
                wall_s=time.monotonic() - self._started,
                cpu_s=max(cpu_s, self._stopped_cpu_s),
                starved_s=self._starvation.starved_s if self._starvation else 0.0,
                idle_s=self._starvation.idle_s if self._starvation else 0.0,
            )
        )

    def _release(self) -> None:
        self._cancel_timers()
        for fd in (self._report, self._stdout.fd, self._stderr.fd, self._pidfd):
            if fd is not None:
                self._loop.remove_reader(fd)
        self._fds.close()


def open_pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    """Return the ends of a pipe: the reading end, which does not block and is ours, and the writing end."""
    reading, writing = os.pipe()
    ours.callback(os.close, reading)
    theirs.callback(os.close, writing)
    os.set_blocking(reading, False)
    return reading, writing


def read_pipe(fd: int) -> str:
    """Return the text that is in a pipe now, at most 4 KiB."""
    try:
        return os.read(fd, 4096).decode("ascii", "replace")
    except BlockingIOError:
        return ""


def memory_file(data: bytes, files: contextlib.ExitStack) -> int:
    """Return the descriptor of an anonymous, sealed file that holds ``data``. ``files`` closes it."""
    fd = os.memfd_create("file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    files.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sealed)
    return fd


def result_of(ended: Ended, limits: SandboxLimits) -> RunResult:
    """Return the result of a run.

    Raises:
        SandboxError: The jail failed before it started the program.
    """
    reason, status, peak = _outcome(ended, limits)
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


def _outcome(ended: Ended, limits: SandboxLimits) -> tuple[ExitReason, int | None, int | None]:
    """Return why a run ended, and its exit status and its peak memory in bytes if they are known."""
    lines = ended.report.split("\n")
    if lines[0] != "ready":
        if ended.reason is ExitReason.KILLED:
            return ExitReason.KILLED, None, None
        message = (ended.report.removeprefix("failed: ") or ended.stderr.text()).strip()[-500:]
        if ended.reason is ExitReason.TIMEOUT:
            message = "it took too long; check the load of this machine"
        raise SandboxError(f"the jail did not start: {message or 'no message'}")
    try:
        wait_status, peak_kib = (int(word) for word in lines[1].split()[:2])
    except (IndexError, ValueError):  # the launcher ended before it could report the end
        stopped = ended.reason or (ExitReason.MEMORY if ended.out_of_memory else ExitReason.KILLED)
        return stopped, None, None
    status, peak = os.waitstatus_to_exitcode(wait_status), peak_kib * 1024
    if ended.reason is not None:
        return ended.reason, None, peak
    computed = ended.cpu_s >= _NEAR_CPU_LIMIT * limits.cpu_s
    if ended.out_of_memory and status != 0:
        return ExitReason.MEMORY, None, peak
    if computed and status in (-signal.SIGXCPU, -signal.SIGKILL):  # a program can send itself either
        return ExitReason.CPU, None, peak
    if status == -signal.SIGKILL:
        return ExitReason.KILLED, status, peak
    if status == 1 and "memory" in lines:
        return ExitReason.MEMORY, None, peak
    return ExitReason.OK if status == 0 else ExitReason.ERROR, status, peak


def isolation_advice(trouble: str) -> str:
    """Return the kernel's message with advice on what to do about it."""
    advice = {
        "seccomp": "the kernel lacks seccomp filters (CONFIG_SECCOMP_FILTER)",
        "namespace": "the kernel forbids user namespaces; set kernel.unprivileged_userns_clone=1, "
        "user.max_user_namespaces above 0 and kernel.apparmor_restrict_unprivileged_userns=0, or in Docker "
        "--security-opt seccomp=unconfined",
        "uid map": "the kernel forbids user namespaces to this user (AppArmor: "
        "kernel.apparmor_restrict_unprivileged_userns=0)",
    }
    hints = [text for words, text in advice.items() if words in trouble.lower()]
    return "; ".join([trouble, *hints[:1], NO_ISOLATION])
