"""Child processes: shown, logged, and ended with their parent, even if the parent is killed with ``kill -9``."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import current_thread, main_thread
from typing import IO, BinaryIO

from afm.errors import ConfigError

PARENT_VARIABLE = "AFM_PARENT_PROCESS"
"""Environment variable of a child: the id of the process that it must not outlive."""

KEPT_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:"
    "glibc.malloc.trim_threshold=100000000000:glibc.malloc.arena_max=1"
}
"""Variables with which training on a CPU keeps its memory until it ends. glibc 2.35 and newer reads all of them.

Otherwise glibc returns the memory of each large tensor to the kernel, and asks for it again. A step of 16 rows of
SmolLM2 gets 500,000 pages, which takes a third of its time. With one arena, memory grows by a fifth. With an arena for
each thread it would double.
"""

_USUAL = (
    *("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER"),
    *("LANG", "LC_ALL", "LC_CTYPE"),
    *("PYTHONPATH", "VIRTUAL_ENV"),
    # Limits of this process also apply to its children.
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)
_PR_SET_PDEATHSIG = 1
_MAX_LINE_BYTES = 1_000_000


def program_environment(names: Sequence[str], whose: str) -> dict[str, str]:
    """Return the environment for a foreign program: the usual variables, which hold no keys, and ``names``.

    Args:
        names: Further variables from a YAML.
        whose: Name of the program, for errors.

    Raises:
        ConfigError: One of ``names`` is not set.
    """
    usual = {name: os.environ[name] for name in _USUAL if name in os.environ}
    return usual | named_environment(names, whose)


def named_environment(names: Sequence[str], whose: str) -> dict[str, str]:
    """Return only these variables. Raises the error of :func:`program_environment`."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(f"environment variables of {whose} are not set: {', '.join(missing)}")
    return {name: os.environ[name] for name in names}


def tied_environment() -> dict[str, str]:
    """Return the environment for a child that calls :func:`follow_parent`."""
    return os.environ | {PARENT_VARIABLE: str(os.getpid())}


def hold_interrupts() -> None:
    """Let Ctrl-C wait until the program that replaces this one calls :func:`receive_interrupts`.

    A Python program that is interrupted while it imports its modules would print a traceback.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def receive_interrupts() -> None:
    """Receive a held Ctrl-C, and all later ones."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def follow_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Call :func:`die_with_parent` if this process was started with :func:`tied_environment`."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        die_with_parent(number, parent=int(parent))


def die_with_parent(number: signal.Signals = signal.SIGTERM, *, parent: int | None = None) -> None:
    """Ask Linux to send signal ``number`` to this process when its parent ends.

    Call it at the start of the child, in its main thread. On other systems it does nothing.

    Args:
        parent: Process id of the parent, which may have ended already; by default the current parent.
    """
    if not sys.platform.startswith("linux"):
        return
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != expected:  # the parent ended before the request took effect
        raise SystemExit(128 + number)


def run_logged(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log_path: Path,
    keep_open: Sequence[int],
    watch: Callable[[], None] | None = None,
) -> int:
    """Run a command to its end. Its output goes to ``log_path``, and to standard output unless ``watch`` is given.

    Progress bars move on a terminal, and the log keeps their last state. The first Ctrl-C is passed on, the second one
    kills the command.

    Args:
        watch: Is called after each piece of output, and at the end.

    Returns:
        The exit status, or 128 + n if signal n ended the command. After a second Ctrl-C, n is that of the first one.
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
            status = _until_end(child, child.stdout, _LineLog(log, watch))
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return status if status >= 0 else 128 - status


def _until_end(child: subprocess.Popen[bytes], output: IO[bytes], log: _LineLog) -> int:
    interrupts = 0

    def interrupt(*_: object) -> None:  # an exception instead could come while the one before is handled
        nonlocal interrupts
        interrupts += 1
        first = interrupts == 1
        with suppress(OSError):  # the child has just ended, or nobody reads standard error
            os.killpg(child.pid, signal.SIGINT if first else signal.SIGKILL)
            if first:
                os.write(2, b"\nstopping; Ctrl-C again ends it at once\n")

    before = signal.getsignal(signal.SIGINT)
    listens = before is signal.default_int_handler and current_thread() is main_thread()
    try:
        if listens:
            signal.signal(signal.SIGINT, interrupt)
        while chunk := os.read(output.fileno(), 65_536):
            log.write(chunk)
        log.close()
        status = child.wait()
    finally:
        if listens:
            signal.signal(signal.SIGINT, before)
    return -signal.SIGINT if interrupts > 1 and status == -signal.SIGKILL else status


class _LineLog:
    """Writes whole lines to a log and shows the output: immediately on a terminal, else in whole lines."""

    def __init__(self, log: BinaryIO, watch: Callable[[], None] | None) -> None:
        self._log = log
        self._watch = watch
        self._raw = watch is None and sys.stdout.isatty()
        self._lines = watch is None and not self._raw
        self._rest = b""

    def write(self, chunk: bytes) -> None:
        if self._raw:
            _show(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-_MAX_LINE_BYTES:]
        for line in lines:
            self._line(line)
        if self._watch is not None:
            self._watch()

    def close(self) -> None:
        if self._rest:
            self._line(self._rest)
        if self._watch is not None:
            self._watch()

    def _line(self, line: bytes) -> None:
        last = line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"  # the last state of a progress bar
        self._log.write(last)
        self._log.flush()
        if self._lines:
            _show(last)


def _show(text: bytes) -> None:
    sys.stdout.write(text.decode("utf-8", errors="replace"))
    sys.stdout.flush()
