"""Run a harness's program once, with limits, and kill every process that it started.

Processes that left the program's session are found by a variable in their environment, which children inherit, or by
their working folder. Processes that outlive the program are counted in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from afm.errors import ConfigError
from afm.sandbox.run import Capture, memory_file, open_pipe

MARK = "AFM_EPISODE"
"""Environment variable that holds the episode. Every process of a program inherits it."""
TAIL_CHARACTERS = 4096
NO_VERDICT = "the verdict file (AFM_VERDICT) is not a regular file that can be read; write JSON into it"
_KILL_S = 10.0
"""Most seconds to wait for killed processes."""


class ProgramEnd(StrEnum):
    """Ways in which a program ends."""

    DONE = "done"
    CRASHED = "crashed"
    """It ended with a status other than 0."""
    TIMEOUT = "timeout"
    OUTPUT = "output"
    """It wrote more than the limit."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """How a program ended.

    Attributes:
        stdout: Standard output, decoded as UTF-8 with invalid bytes replaced.
        stderr: Last 4,096 characters of standard error.
        status: Exit status as ``subprocess`` reports it. ``None`` if the program was killed.
        left_behind: Number of processes that outlived the program and were killed.
        verdict: Text of the verdict file, ``None`` without one.
        verdict_fault: Why the verdict file was not read. Empty if it was read or does not exist.
    """

    end: ProgramEnd
    stdout: str
    stderr: str
    status: int | None
    seconds: float
    left_behind: int = 0
    verdict: str | None = None
    verdict_fault: str = ""

    @property
    def failure(self) -> str:
        """Why the run failed, in a sentence. Empty if it ended well."""
        match self.end:
            case ProgramEnd.DONE:
                return ""
            case ProgramEnd.TIMEOUT:
                return f"the program did not end within {self.seconds:.0f} s"
            case ProgramEnd.OUTPUT:
                return "the program wrote more than harness.max_output_bytes"
        last = self.stderr.strip().rpartition("\n")[2]
        return f"the program ended with status {self.status}" + (f": {last}" if last else "")


async def run_program(
    words: Sequence[str],
    *,
    episode: str,
    folder: Path,
    env: Mapping[str, str],
    stdin: bytes,
    timeout_s: float,
    max_output_bytes: int,
    verdict_file: Path,
) -> ProgramRun:
    """Run a command to its end. No process that it started outlives this call, even if the call is cancelled.

    Args:
        words: Program and arguments.
        episode: Unique name that marks the processes.
        folder: Working folder.
        env: Complete environment. Only the mark is added.
        stdin: Standard input.
        timeout_s: Seconds after which the program is killed.
        max_output_bytes: Most bytes of standard output, and of standard error.
        verdict_file: File that is read when the program has ended.

    Raises:
        ConfigError: The program cannot be started.
    """
    begun = time.monotonic()
    with contextlib.ExitStack() as ours:
        with contextlib.ExitStack() as theirs:
            out, out_end = open_pipe(ours, theirs)
            err, err_end = open_pipe(ours, theirs)
            process = _start(
                words, folder, {**env, MARK: episode}, memory_file(stdin, theirs), out_end, err_end
            )
        streams = Capture(out, max_output_bytes), Capture(err, max_output_bytes)
        left_behind = 0
        try:
            end = await _first_end(process.pid, streams, timeout_s)
            if end is ProgramEnd.DONE:
                left_behind = len(await asyncio.to_thread(_processes, episode, folder))
        finally:
            await asyncio.shield(asyncio.to_thread(_kill, process, episode, folder))
        for stream in streams:  # every writer has ended, so this loop ends
            while not stream.cut and stream.read():
                pass
    if any(stream.cut for stream in streams):
        end = ProgramEnd.OUTPUT
    elif end is ProgramEnd.DONE and process.returncode:
        end = ProgramEnd.CRASHED
    return ProgramRun(
        end,
        streams[0].text(),
        streams[1].text()[-TAIL_CHARACTERS:],
        process.returncode if end in (ProgramEnd.DONE, ProgramEnd.CRASHED) else None,
        time.monotonic() - begun,
        left_behind,
        *read_verdict(verdict_file, max_output_bytes),
    )


def _start(
    words: Sequence[str], folder: Path, env: Mapping[str, str], stdin: int, out: int, err: int
) -> subprocess.Popen[bytes]:
    """Start the program in the calling thread. When that thread ends, the program is killed."""
    try:
        return subprocess.Popen(
            [*_tied(), *words],
            stdin=stdin,
            stdout=out,
            stderr=err,
            cwd=folder,
            env=dict(env),
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"harness.command: {words[0]!r} cannot be started: {error}") from None


def read_verdict(file: Path, max_bytes: int) -> tuple[str | None, str]:
    """Return the text of a verdict file or ``None``, and why it was not read. Links are not followed."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None, ""
    except OSError:
        return None, NO_VERDICT
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None, NO_VERDICT
        with os.fdopen(descriptor, "rb", closefd=False) as opened:
            return opened.read(max_bytes).decode("utf-8", "replace"), ""
    finally:
        os.close(descriptor)


async def _first_end(process: int, streams: Sequence[Capture], timeout_s: float) -> ProgramEnd:
    """Wait until a process ends, exceeds its output limit or its time."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[ProgramEnd] = loop.create_future()

    def settle(end: ProgramEnd) -> None:
        if not ended.done():
            ended.set_result(end)

    def take(stream: Capture) -> None:
        more = stream.read()
        if stream.cut:
            settle(ProgramEnd.OUTPUT)
        if not more and (stream.cut or not stream.open):
            loop.remove_reader(stream.fd)

    pidfd = os.pidfd_open(process)
    try:
        loop.add_reader(pidfd, settle, ProgramEnd.DONE)
        for stream in streams:
            loop.add_reader(stream.fd, take, stream)
        return await asyncio.wait_for(ended, timeout_s)
    except TimeoutError:
        return ProgramEnd.TIMEOUT
    finally:
        for fd in (pidfd, *(stream.fd for stream in streams)):
            loop.remove_reader(fd)
        os.close(pidfd)


@cache
def _tied() -> tuple[str, ...]:
    """Return a command prefix that ties a program's life to this process. Empty without util-linux."""
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "KILL", "--") if setpriv else ()


def _kill(leader: subprocess.Popen[bytes], episode: str, folder: Path) -> None:
    """Kill the program's session and every process that left it; return when all of them have ended.

    A killed process takes a while to end on a busy machine, so each one is awaited. A process may be forked during the
    search, so the search is repeated until it finds none.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    deadline = time.monotonic() + _KILL_S
    while (processes := _processes(episode, folder)) and time.monotonic() < deadline:
        for process in processes:
            _end(process, deadline)


def _end(process: int, deadline: float) -> None:
    """Kill a process and wait until it has ended, at most until ``deadline`` (of ``time.monotonic``)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        pidfd = os.pidfd_open(process)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            ended = select.poll()  # select() takes no descriptor above 1,023
            ended.register(pidfd, select.POLLIN)
            ended.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            os.close(pidfd)


def _processes(episode: str, folder: Path) -> list[int]:
    """Return the processes with an episode's mark in their environment, or with a working folder in its folder.

    A process that has ended has neither.
    """
    mark, folder = f"{MARK}={episode}\0".encode(), folder.resolve()
    processes = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                place = str(Path(entry.path, "cwd").readlink()).removesuffix(" (deleted)")
                if mark in Path(entry.path, "environ").read_bytes() or Path(place).is_relative_to(folder):
                    processes.append(int(entry.name))
    return processes
