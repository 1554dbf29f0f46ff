"""The trainer's process: started, followed, and ended with everything it started."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.processes import die_with_parent
from verl_ext import processes
from verl_ext.metrics import MetricsLog
from verl_ext.ray_watch import Patience

_SOCKET_ROOM = 40
"""Longest scratch path below which Ray's sockets (limit: 107 bytes) still fit."""
_POLL_S = 0.3
_NOTE_S = 5.0
_GRACE_S = 20.0


ALARMED = 3
"""Exit status of a run that an alarm stopped."""
OnStep = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True)
class Ended:
    """How the trainer ended."""

    status: int
    interrupted: bool = False


class Trainer:
    """The trainer's process and everything it starts; leaving the block ends whatever is left."""

    def __init__(self, words: Sequence[str], variables: dict[str, str], log: Path) -> None:
        self._words = words
        self._variables = variables
        self._log = log
        self._asked: int | None = None

    def __enter__(self) -> Trainer:
        processes.adopt_orphans()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._words,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # It would train on without anyone to follow it if this process were killed.
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
        processes.end_descendants()
        self._process.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self._asked = number

    def follow(
        self, metrics: MetricsLog, book: processes.ProcessBook, on_step: OnStep, patience: Patience
    ) -> Ended:
        """Hand on each step's metrics until the trainer ends, ``on_step`` says so, somebody asks us to, or patience ends."""
        noted = 0.0
        while True:
            status = self._process.poll()
            for row in metrics.follow():
                if on_step(row):
                    return Ended(ALARMED)
            if status is not None:
                return Ended(status if status >= 0 else 128 - status)
            if self._asked is not None:
                return Ended(128 + self._asked, interrupted=True)
            if patience.ended:
                return Ended(1)
            if time.monotonic() - noted > _NOTE_S:
                book.note_descendants()
                noted = time.monotonic()
            time.sleep(_POLL_S)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for Ray's sockets and logs, removed afterwards."""
    parent = tempfile.gettempdir()
    if len(parent) + len(processes.SCRATCH_PREFIX) + 8 > _SOCKET_ROOM:
        parent = "/tmp"
    with tempfile.TemporaryDirectory(
        prefix=processes.SCRATCH_PREFIX, dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)
