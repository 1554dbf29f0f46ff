"""The processes of a run: the trainer, which is followed until it ends, and everything that it starts.

A process is identified by its id and start time, so a later start can end the processes of a crashed run and no others.
The module reads process tables from ``/proc``, so it needs Linux, as verl does.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from afm.errors import ConfigError
from afm.processes import die_with_parent
from afm.runs.atomic import replace_text
from verl_ext.metrics import MetricsLog
from verl_ext.ray_watch import TrainerPatience

_SET_CHILD_SUBREAPER = 36
_KILL_S = 30.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process, identified safely even if its id is reused.

    Attributes:
        started: Clock ticks between boot and the start of the process.
    """

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether exactly this process still runs. A zombie does not."""
        status = _stat(self.pid)
        return status is not None and status.started == self.started and status.state not in "ZX"


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    parent: int
    started: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name in parentheses may contain blanks and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(state=fields[0], parent=int(fields[1]), started=int(fields[19]))


def this_process() -> Process:
    """Return the calling process."""
    status = _stat(os.getpid())
    return Process(os.getpid(), status.started if status else 0)


def descendants(root: int) -> set[Process]:
    """Return the children of ``root``, their children, and so on, without zombies."""
    table = {
        int(entry.name): _stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()
    }
    children: dict[int, list[int]] = {}
    for pid, status in table.items():
        if status is not None:
            children.setdefault(status.parent, []).append(pid)
    result: set[Process] = set()
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, ())
        status = table[pid]
        if status is not None and status.state not in "ZX":
            result.add(Process(pid, status.started))
    return result


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, so that :func:`descendants` still finds them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end(processes: Collection[Process], grace_s: float = 5.0) -> int:
    """Ask ``processes`` to end, kill those that do not within ``grace_s``, and return how many were alive.

    A busy machine may take seconds to end a killed process, so the wait after the kill does not depend on ``grace_s``.
    """
    alive = [process for process in processes if process.alive]
    for number, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_S)):
        for process in alive:
            _signal(process, number)
        alive_until = time.monotonic() + patience
        while time.monotonic() < alive_until and any(process.alive for process in alive):
            _reap(alive)
            time.sleep(0.05)
    _reap(alive)
    return len(alive)


def end_descendants(grace_s: float = 5.0) -> int:
    """End every descendant of the caller and return how many there were."""
    total = 0
    while living := descendants(os.getpid()):
        total += end(living, grace_s)
    return total


def _signal(process: Process, number: signal.Signals) -> None:
    if process.alive:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def _reap(processes: Iterable[Process]) -> None:
    for process in processes:
        try:
            os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            continue


@dataclass(frozen=True, slots=True)
class _Entry:
    boot: str
    launcher: Process
    processes: tuple[Process, ...]
    scratch: Path


class ProcessBook:
    """A file of the processes of a run, so that a later start can end those that a crash left.

    Args:
        path: The file, which holds the boot id, the launcher, its descendants and its scratch folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: set[Process] = set()

    def claim(self, scratch: Path, *, patience_s: float = 60.0) -> int:
        """Take over the run and return how many leftover processes were ended.

        Args:
            patience_s: Seconds to wait for another launcher to end. A launcher whose caller was killed needs time to
                end its trainer.

        Raises:
            ConfigError: Another launcher still trains in the folder.
        """
        ended = 0
        deadline = time.monotonic() + patience_s
        while (other := self._other_launcher()) is not None:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"{self._path.parent}: process {other.pid} is training here; wait for it, end it, "
                    "or choose another output_dir"
                )
            time.sleep(0.2)
        before = self._read()
        if before is not None and before.boot == _boot_id():
            ended = end(before.processes)
        if before is not None and before.scratch != scratch:
            _remove_tree(before.scratch)
        self._scratch = scratch
        self._write(set())
        return ended

    def _other_launcher(self) -> Process | None:
        entry = self._read()
        if entry is None or entry.boot != _boot_id() or entry.launcher == this_process():
            return None
        return entry.launcher if entry.launcher.alive else None

    def note_descendants(self) -> None:
        """Write the current descendants to the file if new ones have started."""
        living = descendants(os.getpid())
        if not living <= self._written:
            self._write(living)

    def release(self) -> None:
        """Remove the file of a run that has ended and left no process."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> _Entry | None:
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            return _Entry(
                boot=data["boot"],
                launcher=Process(**data["launcher"]),
                processes=tuple(Process(**row) for row in data["processes"]),
                scratch=Path(data["scratch"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None  # the file is absent, or a crash truncated it

    def _write(self, processes: set[Process]) -> None:
        data = {
            "boot": _boot_id(),
            "launcher": asdict(this_process()),
            "processes": [asdict(process) for process in sorted(processes, key=lambda p: p.pid)],
            "scratch": str(self._scratch),
        }
        replace_text(self._path, json.dumps(data))
        self._written = processes


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


SCRATCH_PREFIX = "afm-rl-"


def _remove_tree(path: Path) -> None:
    # The path comes from a file, so the check of its name keeps any other folder from being removed.
    if path.name.startswith(SCRATCH_PREFIX):
        shutil.rmtree(path, ignore_errors=True)


_SOCKET_ROOM = 40
"""Longest scratch path, in bytes, with which the paths of Ray's sockets stay within 107 bytes."""
_POLL_S = 0.3
_NOTE_S = 5.0
_GRACE_S = 20.0


ALARMED = 3
"""Exit status of a run that an alarm stopped."""
OnStep = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True)
class TrainerExit:
    """The exit status of a trainer, and whether a signal to the launcher ended it."""

    status: int
    interrupted: bool = False


class Trainer:
    """The trainer's process and everything that it starts. Leaving the block ends the remaining processes."""

    def __init__(self, words: Sequence[str], variables: dict[str, str], log: Path) -> None:
        self._words = words
        self._variables = variables
        self._log = log
        self._asked: int | None = None

    def __enter__(self) -> Trainer:
        adopt_orphans()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._words,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Otherwise the trainer would continue if this process were killed.
                preexec_fn=die_with_parent,
            )
        self._before = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        end_descendants()
        self._process.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self._asked = number

    def follow(
        self, metrics: MetricsLog, book: ProcessBook, on_step: OnStep, patience: TrainerPatience
    ) -> TrainerExit:
        """Pass each step's metrics to ``on_step`` until that returns true, a signal arrives, or trainer or patience end."""
        noted = 0.0
        while True:
            status = self._process.poll()
            for row in metrics.follow():
                if on_step(row):
                    return TrainerExit(ALARMED)
            if status is not None:
                return TrainerExit(status if status >= 0 else 128 - status)
            if self._asked is not None:
                return TrainerExit(128 + self._asked, interrupted=True)
            if patience.ended:
                return TrainerExit(1)
            if time.monotonic() - noted > _NOTE_S:
                book.note_descendants()
                noted = time.monotonic()
            time.sleep(_POLL_S)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder for Ray's sockets and logs, and remove it at the end of the block."""
    parent = tempfile.gettempdir()
    if len(parent) + len(SCRATCH_PREFIX) + 8 > _SOCKET_ROOM:
        parent = "/tmp"
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
