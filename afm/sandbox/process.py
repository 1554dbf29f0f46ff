"""One jailed process on the event loop: capped output, wall clock, certain death.

Nothing here waits in the event loop: the process is started in a thread, pipes are read when they have
data, and the end of the process is an event on its pidfd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

from afm.sandbox.base import ExitReason, SandboxLimits
from afm.sandbox.capture import Capture, CpuWatch, Ended, StarvationWatch, drained, pipe, tree_cpu_s
from afm.sandbox.interpreter import Identity

_GRACE_S = 1.0
_START_S = 60.0


class JailedProcess:
    """Starts a jail and follows it to its end.

    It lives by callbacks, not by a task that somebody could cancel halfway.

    Args:
        command: Program and arguments; ``{report}``, ``{info}`` and ``{stderr}`` among them become the numbers of the
            descriptors for the launcher's report, bubblewrap's information and the program's errors. With the last
            of them, what the jail itself writes to its stderr is shown only if the program does not begin.
        stdin: Descriptor of the program's standard input.
        inherited: Further descriptors the jail keeps open.
        files: Closes ``stdin`` and ``inherited``; called when the jail has its own copies.
        limits: Those of the run that are kept from outside: output, time from the program's start, CPU time.
        spawner: Starts the process; its threads must outlive the jail, which dies with its parent thread.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        inherited: Sequence[int],
        files: contextlib.ExitStack,
        identity: Identity,
        limits: SandboxLimits,
        spawner: Executor,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        self._informed = "{info}" in command
        self._reason: ExitReason | None = None
        self._limits = limits
        self._cpu_watch: CpuWatch | None = None
        self._starvation: StarvationWatch | None = None
        self._inside: int | None = None
        self._stopped_cpu_s = 0.0
        self._timers: list[asyncio.TimerHandle] = []
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.ExitStack() as ours:
            out, out_end = pipe(ours, files)
            err, err_end = pipe(ours, files)
            self._report, report_end = pipe(ours, files)
            self._info, info_end = pipe(ours, files)
            self._fds = ours.pop_all()
        self._stdout, self._stderr = Capture(out, limits.output_bytes), Capture(err, limits.output_bytes)
        numbers = {"{report}": str(report_end), "{info}": str(info_end), "{stderr}": str(err_end)}
        self._messages = os.memfd_create("messages", os.MFD_CLOEXEC)
        self._fds.callback(os.close, self._messages)
        own_err = self._messages if "{stderr}" in command else err_end

        def start() -> subprocess.Popen[bytes]:
            with files:
                return subprocess.Popen(
                    [numbers.get(word, word) for word in command],
                    stdin=stdin,
                    stdout=out_end,
                    stderr=own_err,
                    pass_fds=(*inherited, report_end, info_end, err_end),
                    cwd="/",
                    env={},
                    start_new_session=True,
                    **identity.popen_arguments(),
                )

        self._started = time.monotonic()
        # In a thread: it waits until the kernel has loaded the program.
        self._loop.run_in_executor(spawner, start).add_done_callback(self._spawned)

    async def wait(self) -> Ended:
        """Until the jail is gone. Cancelling kills it, and returns when it is dead.

        Raises:
            OSError: The process could not be started.
        """
        try:
            return await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self.stop(ExitReason.KILLED)
            await asyncio.wait([self._ended])
            raise

    def _spawned(self, spawning: asyncio.Future[subprocess.Popen[bytes]]) -> None:
        if (error := spawning.exception()) is not None:
            self._fds.close()
            self._ended.set_exception(error)
            return
        self._process = spawning.result()
        self._watch(self._process.pid)

    def _watch(self, pid: int) -> None:
        self._pidfd = os.pidfd_open(pid)
        self._fds.callback(os.close, self._pidfd)
        self._limit_time(_START_S)
        self._loop.add_reader(self._pidfd, self._reap)
        self._loop.add_reader(self._report, self._begun)
        for stream in (self._stdout, self._stderr):
            self._loop.add_reader(stream.fd, self._take, stream)
        if self._reason is not None:  # stopped while it was being started
            self._kill()

    def _limit_time(self, seconds: float) -> None:
        self._timers.append(self._loop.call_later(seconds, self.stop, ExitReason.TIMEOUT))

    def _begun(self) -> None:
        """The launcher is about to run the program: only now its time begins, however busy the machine."""
        self._loop.remove_reader(self._report)
        if self._reason is None:
            self._cancel_timers()
            self._limit_time(self._limits.wall_s)
            self._cpu_watch = CpuWatch(self._used_s, self._limits.cpu_s, lambda: self.stop(ExitReason.CPU))
            self._starvation = StarvationWatch(self._process_one, self._limits.wall_s)

    def _used_s(self) -> float:
        """CPU seconds of the processes that live or were waited for."""
        inside = self._process_one()
        return tree_cpu_s(inside) if inside is not None else 0.0

    def _cancel_timers(self) -> None:
        while self._timers:
            self._timers.pop().cancel()
        for watch in (self._cpu_watch, self._starvation):
            if watch is not None:
                watch.cancel()

    def stop(self, reason: ExitReason) -> None:
        """Kill the jail with everything in it; the first reason counts."""
        if self._reason is None and not self._ended.done():
            self._reason = reason
            if self._process is not None:
                self._kill()

    def _kill(self) -> None:
        # Process 1 of the jail takes every descendant with it, and bubblewrap then ends and reaps it.
        # Before it exists everything is still in bubblewrap's process group.
        inside = self._process_one()
        if inside is None:
            self._kill_group()
            return
        if self._starvation is not None:
            self._starvation.look()
        self._stopped_cpu_s = tree_cpu_s(inside)  # the kernel forgets the time of processes nobody waited for
        with contextlib.suppress(ProcessLookupError):
            os.kill(inside, signal.SIGKILL)
        self._timers.append(self._loop.call_later(_GRACE_S, self._kill_group))

    def _process_one(self) -> int | None:
        """Process 1 of the jail, once it is known."""
        if self._inside is None:
            self._inside = self._child_from_info() if self._informed else self._first_child()
        return self._inside

    def _child_from_info(self) -> int | None:
        try:
            info = os.read(self._info, 4096)
        except BlockingIOError:
            return None
        match = re.search(rb'"child-pid": (\d+)', info)
        return int(match[1]) if match else None

    def _first_child(self) -> int | None:
        """Process 1 of a jail that does not tell which it is: the only child of what was started."""
        assert self._process is not None
        pid = str(self._process.pid)
        try:
            children = Path("/proc", pid, "task", pid, "children").read_text(encoding="ascii").split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def _kill_group(self) -> None:
        if self._process is not None and not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _take(self, stream: Capture) -> None:
        more = stream.read()
        if stream.cut:
            self.stop(ExitReason.OUTPUT)
        if not more and (stream.cut or not stream.open):
            self._loop.remove_reader(stream.fd)

    def _reap(self) -> None:
        assert self._process is not None
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._cancel_timers()
        for fd in (self._pidfd, self._report, self._stdout.fd, self._stderr.fd):
            self._loop.remove_reader(fd)
        for stream in (self._stdout, self._stderr):  # every writer is dead: this ends
            while not stream.cut and stream.read():
                pass
        if self._stdout.cut or self._stderr.cut:
            self._reason = self._reason or ExitReason.OUTPUT
        report = drained(self._report)
        if not report:
            self._stderr.data += os.pread(self._messages, 4096, 0)
        self._fds.close()
        wall_s = time.monotonic() - self._started
        cpu_s = max(usage.ru_utime + usage.ru_stime, self._stopped_cpu_s)
        times = (self._starvation.starved_s, self._starvation.idle_s) if self._starvation else (0.0, 0.0)
        ended = Ended(self._stdout, self._stderr, report, self._reason, wall_s, cpu_s, False, *times)
        self._ended.set_result(ended)
