"""Child processes: started, shown and logged, interrupted and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from afm.errors import AfmError, UsageError
from afm.processes import PARENT_VARIABLE

_MAX_LINE_BYTES = 1_000_000


@contextmanager
def process_border() -> Iterator[None]:
    """End the process with one clear message, and a documented status, for errors raised on purpose."""
    try:
        yield
    except AfmError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def run_logged(
    command: Sequence[str], *, env: Mapping[str, str], log_path: Path, keep_open: Sequence[int], echo: bool
) -> int:
    """Run a command to its end; its output goes to ``log_path`` and, with ``echo``, to our standard output.

    Progress bars stay alive on a terminal; the log keeps their last state only. The first Ctrl-C is passed on,
    the second one kills.

    Returns:
        Its exit status; 128 + n when signal n ended it.
    """
    child = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**env, PARENT_VARIABLE: str(os.getpid())},
        pass_fds=tuple(keep_open),
        start_new_session=True,
    )
    assert child.stdout is not None
    with log_path.open("ab") as log:
        show = _shower() if echo else None
        try:
            status = _until_end(child, child.stdout, _LineLog(log, show))
        finally:
            if child.poll() is None:
                _signal_group(child, signal.SIGKILL)
                child.wait()
    return status if status >= 0 else 128 - status


def _until_end(child: subprocess.Popen[bytes], output: IO[bytes], log: _LineLog) -> int:
    interrupts = 0
    while True:
        try:
            while chunk := os.read(output.fileno(), 65_536):
                log.write(chunk)
            log.close()
            return child.wait()
        except KeyboardInterrupt:
            interrupts += 1
            _signal_group(child, signal.SIGINT if interrupts == 1 else signal.SIGKILL)


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return


class _LineLog:
    """Writes whole lines to a log and shows the output, whole lines or as it comes."""

    def __init__(self, log: BinaryIO, show: Callable[[bytes], None] | None) -> None:
        self._log = log
        self._show = show
        self._raw = show is not None and sys.stdout.isatty()
        self._rest = b""

    def write(self, chunk: bytes) -> None:
        if self._raw and self._show is not None:
            self._show(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-_MAX_LINE_BYTES:]
        for line in lines:
            self._line(line)

    def close(self) -> None:
        if self._rest:
            self._line(self._rest)
            self._rest = b""

    def _line(self, line: bytes) -> None:
        last = line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"  # what a progress bar ended at
        self._log.write(last)
        self._log.flush()
        if not self._raw and self._show is not None:
            self._show(last)


def _shower() -> Callable[[bytes], None]:
    def show(text: bytes) -> None:
        sys.stdout.write(text.decode("utf-8", errors="replace"))
        sys.stdout.flush()

    return show
