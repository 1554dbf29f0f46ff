"""One jailed process on the event loop: capped output, wall clock, certain death.

Nothing here waits in the event loop: pipes are read when they have data, and the end of the process is
an event on its pidfd. Only starting it costs about a millisecond (fork and exec).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from afm.sandbox.base import ExitReason
from afm.sandbox.interpreter import Identity

_CHUNK = 1 << 16
_GRACE_S = 1.0


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
    """

    stdout: Capture
    stderr: Capture
    report: str
    reason: ExitReason | None
    wall_s: float
    cpu_s: float


class JailedProcess:
    """Starts a jail and follows it to its end.

    Args:
        command: Program and arguments; ``{report}`` and ``{info}`` in them become the numbers of the
            descriptors for the launcher's report and bubblewrap's information.
        inherited: Further descriptors the jail keeps open.
        stdin: Descriptor of the program's standard input.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        inherited: Sequence[int],
        identity: Identity,
        output_bytes: int,
        wall_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        self._reason: ExitReason | None = None
        self._fds = contextlib.ExitStack()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            out, out_end = _pipe(ours, theirs)
            err, err_end = _pipe(ours, theirs)
            self._report, report_end = _pipe(ours, theirs)
            self._info, info_end = _pipe(ours, theirs)
            self._started = time.monotonic()
            process = subprocess.Popen(
                [part.format(report=report_end, info=info_end) if "{" in part else part for part in command],
                stdin=stdin,
                stdout=out_end,
                stderr=err_end,
                pass_fds=(*inherited, report_end, info_end),
                cwd="/",
                env={},
                start_new_session=True,
                **identity.popen_arguments(),  # type: ignore[call-overload]
            )
            self._fds = ours.pop_all()
        self._process = process
        self._stdout, self._stderr = Capture(out, output_bytes), Capture(err, output_bytes)
        self._pidfd = os.pidfd_open(process.pid)
        self._fds.callback(os.close, self._pidfd)
        self._clock = self._loop.call_later(wall_s, self.stop, ExitReason.TIMEOUT)
        self._grace: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._pidfd, self._reap)
        for stream in (self._stdout, self._stderr):
            self._loop.add_reader(stream.fd, self._take, stream)

    async def wait(self) -> Ended:
        """Until the jail is gone. Cancelling kills it, and returns only when it is dead."""
        try:
            return await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self.stop(ExitReason.KILLED)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(self._ended)
            raise

    def stop(self, reason: ExitReason) -> None:
        """Kill the jail with everything in it; the first reason counts."""
        if self._reason is not None or self._ended.done():
            return
        self._reason = reason
        # Process 1 of the jail takes every descendant with it, and bubblewrap then ends and reaps it.
        # Before it exists everything is still in bubblewrap's process group.
        inside = self._process_one()
        if inside is None:
            self._kill_group()
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(inside, signal.SIGKILL)
        self._grace = self._loop.call_later(_GRACE_S, self._kill_group)

    def _process_one(self) -> int | None:
        try:
            told = os.read(self._info, 4096)
        except BlockingIOError:
            return None
        found = re.search(rb'"child-pid": (\d+)', told)
        return int(found[1]) if found else None

    def _kill_group(self) -> None:
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _take(self, stream: Capture) -> None:
        more = stream.read()
        if stream.cut:
            self.stop(ExitReason.OUTPUT)
        if not more and (stream.cut or not stream.open):
            self._loop.remove_reader(stream.fd)

    def _reap(self) -> None:
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._clock.cancel()
        if self._grace is not None:
            self._grace.cancel()
        for fd in (self._pidfd, self._stdout.fd, self._stderr.fd):
            self._loop.remove_reader(fd)
        for stream in (self._stdout, self._stderr):  # every writer is dead: this ends
            while not stream.cut and stream.read():
                pass
        if self._stdout.cut or self._stderr.cut:
            self._reason = self._reason or ExitReason.OUTPUT
        report = _drained(self._report)
        self._fds.close()
        if not self._ended.done():
            wall_s = time.monotonic() - self._started
            cpu_s = usage.ru_utime + usage.ru_stime
            ended = Ended(self._stdout, self._stderr, report, self._reason, wall_s, cpu_s)
            self._ended.set_result(ended)


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose reading end is ours and does not block."""
    reading, writing = os.pipe()
    ours.callback(os.close, reading)
    theirs.callback(os.close, writing)
    os.set_blocking(reading, False)
    return reading, writing


def _drained(fd: int) -> str:
    try:
        return os.read(fd, 4096).decode("ascii", "replace")
    except BlockingIOError:
        return ""


def memory_file(name: str, data: bytes, close_with: Callable[[Callable[..., None], int], object]) -> int:
    """An anonymous file that holds ``data`` and can never change, positioned at its beginning."""
    import fcntl

    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    close_with(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sealed)
    return fd
