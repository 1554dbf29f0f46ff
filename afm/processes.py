"""Child processes: shown and logged, and never outliving the one that started them, even if that is killed by ``kill -9``."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO

from afm.errors import ConfigError

PARENT_VARIABLE = "AFM_PARENT_PROCESS"
"""Set in a child's environment: the id of the process it must not outlive."""

_USUAL = (
    *("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER"),
    *("LANG", "LC_ALL", "LC_CTYPE"),
    *("PYTHONPATH", "VIRTUAL_ENV"),
    # Bounds that were set for this process hold for what it starts.
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)
_PR_SET_PDEATHSIG = 1
_MAX_LINE_BYTES = 1_000_000


def program_environment(names: Sequence[str], whose: str) -> dict[str, str]:
    """What a program of others gets of this process's environment: the usual variables, which hold no keys, and ``names``.

    Args:
        names: Further variables, named in a YAML.
        whose: Of which program, for errors.

    Raises:
        ConfigError: One of ``names`` is not set.
    """
    usual = {name: os.environ[name] for name in _USUAL if name in os.environ}
    return usual | named_environment(names, whose)


def named_environment(names: Sequence[str], whose: str) -> dict[str, str]:
    """These variables alone, as :func:`program_environment` has them."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(f"environment variables of {whose} are not set: {', '.join(missing)}")
    return {name: os.environ[name] for name in names}


def tied_environment() -> dict[str, str]:
    """This process's environment, for a child that calls :func:`follow_parent`."""
    return os.environ | {PARENT_VARIABLE: str(os.getpid())}


def follow_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """:func:`die_with_parent`, if the one that started this process asked for it by :func:`tied_environment`."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        die_with_parent(number, parent=int(parent))


def die_with_parent(number: signal.Signals = signal.SIGTERM, *, parent: int | None = None) -> None:
    """Be sent ``number`` when the parent ends (Linux only).

    Call it at the start of the child, in its main thread.

    Args:
        parent: Process id of the parent, in case it has ended already; by default whoever is parent now.
    """
    if not sys.platform.startswith("linux"):
        return
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != expected:  # it ended before the request took effect
        raise SystemExit(128 + number)


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
    try:
        with log_path.open("ab") as log:
            status = _until_end(child, child.stdout, _LineLog(log, echo=echo))
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
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
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGINT if interrupts == 1 else signal.SIGKILL)


class _LineLog:
    """Writes whole lines to a log and shows the output: as it comes on a terminal, else in whole lines."""

    def __init__(self, log: BinaryIO, *, echo: bool) -> None:
        self._log = log
        self._raw = echo and sys.stdout.isatty()
        self._lines = echo and not self._raw
        self._rest = b""

    def write(self, chunk: bytes) -> None:
        if self._raw:
            _show(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-_MAX_LINE_BYTES:]
        for line in lines:
            self._line(line)

    def close(self) -> None:
        if self._rest:
            self._line(self._rest)

    def _line(self, line: bytes) -> None:
        last = line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"  # what a progress bar ended at
        self._log.write(last)
        self._log.flush()
        if self._lines:
            _show(last)


def _show(text: bytes) -> None:
    sys.stdout.write(text.decode("utf-8", errors="replace"))
    sys.stdout.flush()
