"""One run in a zygote on the event loop (capped output, wall clock, certain death), and the place it runs in.

Like :class:`afm.sandbox.process.JailedProcess` a run lives by callbacks and waits for nothing: the end of the
run is an event on the pidfd of its process 1, which ends after every other process of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path

from afm.errors import SandboxError
from afm.sandbox.base import ExitReason, RunResult, SandboxLimits
from afm.sandbox.capture import (
    Capture,
    CpuWatch,
    Ended,
    StarvationWatch,
    drained,
    memory_file,
    outcome,
    pipe,
    tree_cpu_s,
)
from afm.sandbox.cgroup import RunGroups, group_limit
from afm.sandbox.policy import INODES, kernel_limits
from afm.sandbox.zygote_process import RunOrder, Warmth, Zygote, ZygoteJail

_GRACE_S = 2.0


class ZygoteLostError(SandboxError):
    """The zygote died or hung before the run's end; the run says nothing about the program."""


class ZygoteRun:
    """Starts a run and follows it to its end.

    Args:
        request: What the zygote is asked for.
        limits: Those of the run that are kept from outside: output, time from the program's start, CPU time.
        computed_s: CPU seconds of all runs in this zygote's place so far; ``None`` where nothing counts them.
        start_s: Time the zygote has to get the program started.
    """

    def __init__(
        self,
        zygote: Zygote,
        request: RunOrder,
        program: bytes,
        stdin: bytes,
        *,
        limits: SandboxLimits,
        start_s: float,
        computed_s: Callable[[], float] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        self._zygote = zygote
        self._reason: ExitReason | None = None
        self._limits = limits
        self._computed_s = computed_s
        self._computed_before_s = computed_s() if computed_s is not None else 0.0
        self._cpu_watch: CpuWatch | None = None
        self._starvation: StarvationWatch | None = None
        self._stopped_cpu_s = 0.0
        self._pidfd: int | None = None
        self._beginning = ""
        self._timers: list[asyncio.TimerHandle] = []
        self._started = time.monotonic()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            code_fd = memory_file("program", program, theirs.callback)
            stdin_fd = memory_file("stdin", stdin, theirs.callback)
            out, out_end = pipe(ours, theirs)
            err, err_end = pipe(ours, theirs)
            self._report, report_end = pipe(ours, theirs)
            try:
                theirs_fds = [code_fd, stdin_fd, out_end, err_end, report_end]
                socket.send_fds(zygote.control, [request.packet()], theirs_fds)
            except OSError as error:
                raise ZygoteLostError(f"the zygote takes no run: {error}") from error
            self._fds = ours.pop_all()
        self._stdout, self._stderr = Capture(out, limits.output_bytes), Capture(err, limits.output_bytes)
        self._loop.add_reader(zygote.control, self._answered)
        self._loop.add_reader(self._report, self._begun)
        for stream in (self._stdout, self._stderr):
            self._loop.add_reader(stream.fd, self._take, stream)
        self._after(start_s, self._lose, "the zygote does not answer")

    @property
    def abandoned(self) -> bool:
        """Whether the event loop was closed before the run ended."""
        return self._loop.is_closed() and not self._ended.done()

    async def wait(self) -> Ended:
        """Until every process of the run is gone. Cancelling kills them, and returns when they are dead.

        Raises:
            ZygoteLostError: See there.
        """
        try:
            return await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self.stop(ExitReason.KILLED)
            await asyncio.wait([self._ended])
            if not self._ended.cancelled():
                self._ended.exception()  # it was looked at
            raise

    def stop(self, reason: ExitReason) -> None:
        """Kill everything in the run; the first reason counts."""
        if self._reason is None and not self._ended.done():
            self._reason = reason
            if self._pidfd is not None:
                self._kill()

    def _after(self, seconds: float, action: object, *arguments: object) -> None:
        self._timers.append(self._loop.call_later(seconds, action, *arguments))  # type: ignore[arg-type]

    def _cancel_timers(self) -> None:
        while self._timers:
            self._timers.pop().cancel()
        for watch in (self._cpu_watch, self._starvation):
            if watch is not None:
                watch.cancel()

    def _answered(self) -> None:
        """The zygote has forked the run, or could not, or is dead."""
        try:
            data, fds, _, _ = socket.recv_fds(self._zygote.control, 4096, 1)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"the zygote's socket failed: {error}")
            return
        if not data or not fds:
            self._lose(data.decode("utf-8", "replace") or "the zygote died")
            return
        self._pidfd = fds[0]
        self._fds.callback(os.close, self._pidfd)
        self._loop.add_reader(self._pidfd, self._finish)
        if self._reason is not None:  # stopped before it was there
            self._kill()

    def _begun(self) -> None:
        """The program is about to run: only now its time begins, however busy the machine."""
        self._loop.remove_reader(self._report)
        self._beginning = drained(self._report)
        if self._reason is None and self._beginning.startswith("ready"):
            self._cancel_timers()
            self._after(self._limits.wall_s, self.stop, ExitReason.TIMEOUT)
            self._cpu_watch = CpuWatch(self._used_s, self._limits.cpu_s, lambda: self.stop(ExitReason.CPU))
            self._starvation = StarvationWatch(self._process, self._limits.wall_s)

    def _counted_s(self) -> float:
        """CPU seconds of the run so far, as its cgroup counts them; 0 without one."""
        return self._computed_s() - self._computed_before_s if self._computed_s is not None else 0.0

    def _used_s(self) -> float:
        """CPU seconds of the run so far, as far as they can be told."""
        if self._computed_s is not None:
            return self._counted_s()
        pid = self._process()
        return tree_cpu_s(pid) if pid is not None else 0.0

    def _process(self) -> int | None:
        """Process 1 of the run, once the zygote has told it."""
        return _process_of(self._pidfd) if self._pidfd is not None else None

    def _kill(self) -> None:
        assert self._pidfd is not None
        self._cancel_timers()
        self._stopped_cpu_s = self._used_s()
        if self._starvation is not None:
            self._starvation.look()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._after(_GRACE_S, self._zygote.kill)

    def _take(self, stream: Capture) -> None:
        more = stream.read()
        if stream.cut:
            self.stop(ExitReason.OUTPUT)
        if not more and (stream.cut or not stream.open):
            self._loop.remove_reader(stream.fd)

    def _lose(self, why: str) -> None:
        """The zygote is of no use any more; what it forked dies with it."""
        self._zygote.kill()
        if self._ended.done():
            return
        if self._reason is not None and self._beginning.startswith("ready"):  # it was being stopped anyway
            self._conclude(self._beginning)
        else:
            self._release()
            self._ended.set_exception(ZygoteLostError(why))

    def _finish(self) -> None:
        for stream in (self._stdout, self._stderr):  # every writer is dead: this ends
            while not stream.cut and stream.read():
                pass
        if self._stdout.cut or self._stderr.cut:
            self._reason = self._reason or ExitReason.OUTPUT
        report = self._beginning + drained(self._report)
        if self._reason is None and report == "ready\n" and not self._zygote.alive:
            self._lose("the zygote died during the run")
        else:
            self._conclude(report)

    def _conclude(self, report: str) -> None:
        cpu_s = max(_reported_cpu_s(report), self._stopped_cpu_s, self._counted_s())
        self._release()
        wall_s = time.monotonic() - self._started
        times = (self._starvation.starved_s, self._starvation.idle_s) if self._starvation else (0.0, 0.0)
        ended = Ended(self._stdout, self._stderr, report, self._reason, wall_s, cpu_s, False, *times)
        self._ended.set_result(ended)

    def _release(self) -> None:
        self._cancel_timers()
        for fd in (self._zygote.control, self._report, self._stdout.fd, self._stderr.fd, self._pidfd):
            if fd is not None:
                self._loop.remove_reader(fd)
        self._fds.close()


def _process_of(pidfd: int) -> int | None:
    text = Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii")
    match = re.search(r"^Pid:\s+(\d+)$", text, flags=re.MULTILINE)
    return int(match[1]) if match else None


def _reported_cpu_s(report: str) -> float:
    try:
        return float(report.split("\n")[1].split()[2])
    except (IndexError, ValueError):
        return 0.0


@dataclass(frozen=True, slots=True)
class ZygoteTask:
    """A program to run.

    Attributes:
        level: Index of the zygote that suits it.
    """

    program: bytes
    stdin: bytes
    limits: SandboxLimits
    level: int
    stdin_named: bool = True


class ZygotePlace:
    """A zygote for each level of preloaded modules, started when first needed.

    Args:
        levels: How warm a zygote is at each level.
        starter: Starts zygotes; its threads must outlive them.
        groups: Cgroups of the runs.
        start_s: How long a zygote may take to get a program started.
        on_failed: Called with what a new zygote could not load beforehand.
    """

    def __init__(
        self,
        jail: ZygoteJail,
        levels: Sequence[Warmth],
        starter: Executor,
        groups: RunGroups,
        start_s: float,
        on_failed: Callable[[Sequence[str]], None],
    ) -> None:
        self.run: ZygoteRun | None = None
        self._closed = False
        self._jail = jail
        self._levels = levels
        self._starter = starter
        self._groups = groups
        self._start_s = start_s
        self._on_failed = on_failed
        self._zygotes: dict[int, Future[Zygote]] = {}

    async def perform(self, job: ZygoteTask) -> RunResult:
        """Run a program to its end.

        Raises:
            ZygoteLostError: The zygote died or hung; nothing is known about the program.
            SandboxError: No zygote could be started, or the run could not be isolated.
        """
        self._check_open()
        zygote = await self._zygote(job.level)
        self._check_open()
        kills = self._kills()
        limits, groups = job.limits, self._groups
        if groups.memory is not None:
            with contextlib.suppress(OSError):  # a lower limit waits until the last run's memory is free
                groups.memory.limit(group_limit(limits.memory_bytes, limits.file_bytes))
        try:
            self.run = ZygoteRun(
                zygote,
                RunOrder(kernel_limits(limits), limits.file_bytes, INODES, job.stdin_named),
                job.program,
                job.stdin,
                limits=limits,
                start_s=self._start_s,
                computed_s=groups.cpu.used_s if groups.cpu is not None else None,
            )
            ended = await self.run.wait()
        except ZygoteLostError:
            self._check_open()
            raise
        finally:
            self.run = None
        return outcome(replace(ended, out_of_memory=self._kills() > kills), limits)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox was closed while the run waited for its turn")

    def stop(self) -> None:
        """Kill the run in it, if any, and take no other."""
        self._closed = True
        if self.run is not None and not self.run.abandoned:
            self.run.stop(ExitReason.KILLED)

    async def _zygote(self, level: int) -> Zygote:
        starting = self._zygotes.get(level)
        if starting is not None and starting.done() and not _lives(starting):
            del self._zygotes[level]
            await asyncio.to_thread(_end, starting)
            self._check_open()
            starting = None
        if starting is None:
            starting = self._starter.submit(self._start, level)
            self._zygotes[level] = starting
        # Another one may still be warming up for a run that was cancelled: its work is not this run's.
        while others := [
            other for other in self._zygotes.values() if not other.done() and other is not starting
        ]:
            await asyncio.wait([asyncio.ensure_future(_over(other)) for other in others])
        return await asyncio.shield(asyncio.wrap_future(starting))

    def _start(self, level: int) -> Zygote:
        zygote = Zygote(self._jail, self._levels[level], self._groups.add)
        self._on_failed(zygote.failed)
        return zygote

    def _kills(self) -> int:
        return self._groups.memory.kills() if self._groups.memory is not None else 0

    def end_zygotes(self) -> None:
        """Kill the zygotes with all they forked; blocks until they are gone."""
        while self._zygotes:
            _end(self._zygotes.popitem()[1])

    def close(self) -> None:
        """:meth:`end_zygotes`, and remove the cgroups."""
        self.end_zygotes()
        self._groups.remove()


async def _over(starting: Future[Zygote]) -> None:
    with contextlib.suppress(SandboxError, asyncio.CancelledError):
        await asyncio.shield(asyncio.wrap_future(starting))


def _lives(starting: Future[Zygote]) -> bool:
    return not starting.cancelled() and starting.exception() is None and starting.result().alive


def _end(starting: Future[Zygote]) -> None:
    starting.cancel()
    with contextlib.suppress(SandboxError, asyncio.CancelledError):
        if not starting.cancelled():
            starting.result().end()
