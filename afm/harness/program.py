"""Run the programs of a harness with limits, and end every process that they start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from afm.errors import ConfigError
from afm.harness import keeper
from afm.sandbox.run import Capture, memory_file, open_pipe

MARK = "AFM_EPISODE"
"""Environment variable of a program that holds the episode."""
TAIL_CHARACTERS = 4096
T = TypeVar("T")
NO_VERDICT = "the verdict file (AFM_VERDICT) is not a regular file that can be read; write JSON into it"
_REPORT_S = 15.0
"""Most seconds to wait until a keeper has killed its processes."""


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
        if self.status is None:
            return "the process that started the program ended"
        last = self.stderr.strip().rpartition("\n")[2]
        return f"the program ended with status {self.status}" + (f": {last}" if last else "")


class ProgramStarter:
    """A process that starts the programs of one harness (:mod:`afm.harness.keeper`), for a single event loop.

    Args:
        words: The program and its arguments.
        env: The process's environment.
        preload: Whether each program is a fork of the process, which imports the packages that the first ones imported.
            ``words`` must be a Python and a script, with arguments.
    """

    def __init__(self, words: Sequence[str], env: Mapping[str, str], preload: bool = False) -> None:
        self._words, self._preload, self._env = words, preload, env
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = asyncio.Lock()

    async def run(
        self,
        *,
        episode: str,
        folder: Path,
        env: Mapping[str, str],
        stdin: bytes,
        timeout_s: float,
        max_output_bytes: int,
        verdict_file: Path,
    ) -> ProgramRun:
        """Run the program to its end. No process that it started outlives this call, even if the call is cancelled.

        Args:
            episode: Unique name, which the program gets in the variable :data:`MARK`.
            folder: Working folder.
            env: Complete environment. Only the mark is added.
            stdin: Standard input.
            timeout_s: Seconds after which the program is killed.
            max_output_bytes: Most bytes of standard output, and of standard error.
            verdict_file: File that is read when the program has ended.

        Raises:
            ConfigError: The program cannot be started.
        """
        order = {
            "words": self._words,
            "folder": str(folder),
            "env": {**env, MARK: episode},
            "in_fork": self._preload,
        }
        begun = time.monotonic()
        end, streams, report = await self._play(
            json.dumps(order).encode(), stdin, timeout_s, max_output_bytes
        )
        if "error" in report:
            raise ConfigError(f"harness.command: {self._words[0]!r} cannot be started: {report['error']}")
        status = report.get("status")
        if any(stream.cut for stream in streams):
            end = ProgramEnd.OUTPUT
        elif end is ProgramEnd.DONE and status != 0:
            end = ProgramEnd.CRASHED
        return ProgramRun(
            end,
            streams[0].text(),
            streams[1].text()[-TAIL_CHARACTERS:],
            status if end in (ProgramEnd.DONE, ProgramEnd.CRASHED) else None,
            time.monotonic() - begun,
            report.get("left_behind", 0) if end is ProgramEnd.DONE else 0,
            *read_verdict(verdict_file, max_output_bytes),
        )

    async def _play(
        self, order: bytes, stdin: bytes, timeout_s: float, max_output_bytes: int
    ) -> tuple[ProgramEnd, tuple[Capture, Capture], dict[str, Any]]:
        """Return how a program ended, its output and error, and its keeper's report."""
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as theirs:
                (out, out_end), (err, err_end), (report, report_end) = (
                    open_pipe(ours, theirs) for _ in range(3)
                )
                lease_end, lease = os.pipe()
                theirs.callback(os.close, lease_end)
                kept = ours.enter_context(contextlib.ExitStack())
                kept.callback(os.close, lease)
                kept.callback(_give_up, lease)
                texts = [memory_file(text, theirs) for text in (order, stdin)]
                await self._send([*texts, out_end, err_end, lease_end, report_end])
            streams = Capture(out, max_output_bytes), Capture(err, max_output_bytes)
            try:
                end = await _first_end(report, streams, timeout_s)
            finally:
                kept.close()  # the keeper ends the program, and reports
                result = await _to_its_end(asyncio.to_thread(_read_report, report))
            for stream in streams:  # every writer has ended, so this loop ends
                while not stream.cut and stream.read():
                    pass
        return end, streams, result

    async def close(self) -> None:
        """End the process, and all programs that still run."""
        async with self._starting:
            await asyncio.to_thread(self._end)

    async def _send(self, descriptors: Sequence[int]) -> None:
        """Send an order. Start the process before the first one, and again if it was killed."""
        async with self._starting:
            for attempt in range(2):
                if self._control is None:
                    self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [b"run"], descriptors)
                except OSError:
                    if attempt:
                        raise
                    await asyncio.to_thread(self._end)
                else:
                    return

    def _start(self) -> None:
        python = [self._words[0]] if self._preload else [sys.executable, "-I", "-S"]
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                number = str(theirs.fileno())
                self._process = subprocess.Popen(
                    [*python, str(Path(keeper.__file__)), number, *(["preload"] if self._preload else [])],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=dict(self._env),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            self._end()
            raise ConfigError(f"harness.command: {python[0]!r} cannot be started: {error}") from None

    def _end(self) -> None:
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            try:
                process.wait(_REPORT_S)
            except subprocess.TimeoutExpired:  # it imports packages
                process.kill()
                process.wait()


def _give_up(lease: int) -> None:
    """Tell a keeper to end its program. A fork of this process may hold another copy of the lease."""
    with contextlib.suppress(BrokenPipeError):
        os.write(lease, b"-")


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work also if this task is cancelled, even repeatedly, and only then raise."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()


def _read_report(report: int) -> dict[str, Any]:
    """Return a keeper's report, once it has ended the program. Empty if the keeper was killed."""
    text, waiting = b"", select.poll()  # select() takes no descriptor above 1,023
    waiting.register(report, select.POLLIN)
    while waiting.poll(_REPORT_S * 1000):
        chunk = os.read(report, 1 << 16)
        if not chunk:
            break
        text += chunk
    for line in text.decode(errors="replace").splitlines():
        result: dict[str, Any] = json.loads(line)
        return result
    return {}


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


async def _first_end(report: int, streams: Sequence[Capture], timeout_s: float) -> ProgramEnd:
    """Wait until a program ends, exceeds its output limit or its time."""
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

    try:
        loop.add_reader(report, settle, ProgramEnd.DONE)
        for stream in streams:
            loop.add_reader(stream.fd, take, stream)
        return await asyncio.wait_for(ended, timeout_s)
    except TimeoutError:
        return ProgramEnd.TIMEOUT
    finally:
        for fd in (report, *(stream.fd for stream in streams)):
            loop.remove_reader(fd)
