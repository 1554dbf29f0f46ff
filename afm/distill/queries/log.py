"""Samples as they come in: one short line each, appended, so that a killed run goes on with the next sample."""

from __future__ import annotations

import fcntl
import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Self

from afm.datasets import Task
from afm.errors import ConfigError, DataError

_KEY_BYTES = 8
_BLOCK_BYTES = 1 << 16


def task_key(task: Task) -> str:
    """Changes with the question and its gold answer, so that samples of another question are never counted."""
    content = json.dumps([task.question, task.ground_truth], sort_keys=True, default=str)
    return blake2b(content.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).hexdigest()


class SampleLog:
    """The samples of one selection, open for writing by one process at a time. Use it as a context manager.

    Opening drops a half-written last line; its sample is taken again.

    Raises:
        ConfigError: Another process is writing here.
        DataError: A complete line is no sample.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._keys: dict[str, str] = {}
        self._taken: dict[tuple[str, str], tuple[int, int]] = {}

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"{self.path}: another run is writing here; wait for it or stop it") from None
        try:
            _drop_torn_line(self._file)
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def append(self, task: Task, number: int, *, right: bool, stop: str) -> None:
        """Add one sample and hand it to the system at once."""
        if self._file is None:
            raise ValueError("the log is not open; use it in a `with` block")
        key = self._key(task)
        row = {"task": task.id, "key": key, "sample": number, "right": right, "stop": stop}
        self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        self._file.flush()
        self._note(task.id, key, number, right)

    def missing(self, task: Task, samples: int) -> list[int]:
        """Numbers of the samples that have not been taken, of the first ``samples``."""
        done, _ = self._taken.get((task.id, self._key(task)), (0, 0))
        return [number for number in range(samples) if not done >> number & 1]

    def right(self, task: Task, samples: int) -> int:
        """How many of the first ``samples`` are right."""
        _, right = self._taken.get((task.id, self._key(task)), (0, 0))
        return (right & ((1 << samples) - 1)).bit_count()

    def _key(self, task: Task) -> str:
        """Reckoned once: the tests of a program may be megabytes."""
        if task.id not in self._keys:
            self._keys[task.id] = task_key(task)
        return self._keys[task.id]

    def _read(self) -> None:
        with self.path.open("rb") as lines:
            for line, text in enumerate(lines, 1):
                try:
                    row: dict[str, Any] = json.loads(text)
                    self._note(str(row["task"]), str(row["key"]), int(row["sample"]), bool(row["right"]))
                except (ValueError, KeyError, TypeError) as error:
                    raise DataError(
                        f"no sample: {type(error).__name__}: {error}; remove the line, its sample is taken again",
                        path=str(self.path),
                        line=line,
                    ) from None

    def _note(self, task: str, key: str, number: int, right: bool) -> None:
        done, correct = self._taken.get((task, key), (0, 0))
        bit = 1 << number
        if not done & bit:
            self._taken[task, key] = (done | bit, correct | (bit if right else 0))


def _drop_torn_line(file: BinaryIO) -> None:
    """Cut the file behind its last newline."""
    position = size = file.seek(0, os.SEEK_END)
    while position > 0:
        begin = max(0, position - _BLOCK_BYTES)
        file.seek(begin)
        found = file.read(position - begin).rfind(b"\n")
        if found >= 0:
            position = begin + found + 1
            break
        position = begin
    if position != size:
        file.truncate(position)
    file.seek(0, os.SEEK_END)
