"""Samples as they come in: one short line each, appended, so that a killed run goes on with the next sample."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Self

from afm.datasets import Task
from afm.runs.journal import Journal, read_rows

_KEY_BYTES = 8


def task_key(task: Task) -> str:
    """Changes with the question and its gold answer, so that samples of another question are never counted."""
    content = json.dumps([task.question, task.ground_truth], sort_keys=True, default=str)
    return blake2b(content.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).hexdigest()


class SampleLog:
    """The samples of one selection, open for writing by one process at a time. Use it as a context manager.

    The sample of a half-written last line is taken again.

    Raises:
        ConfigError: Another process is writing here.
        DataError: A complete line is no sample.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._journal = Journal(path)
        self._keys: dict[str, str] = {}
        self._taken: dict[tuple[str, str], tuple[int, int]] = {}

    def __enter__(self) -> Self:
        self._journal.__enter__()
        try:
            self._read()
        except BaseException:
            self._journal.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.__exit__()

    def append(self, task: Task, number: int, *, right: bool, stop: str) -> None:
        """Add one sample and hand it to the system at once."""
        key = self._key(task)
        row = {"task": task.id, "key": key, "sample": number, "right": right, "stop": stop}
        self._journal.append_row(row)
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
        for _, row in read_rows(self.path, {"task": str, "key": str, "sample": int, "right": bool}):
            self._note(row["task"], row["key"], row["sample"], row["right"])

    def _note(self, task: str, key: str, number: int, right: bool) -> None:
        done, correct = self._taken.get((task, key), (0, 0))
        bit = 1 << number
        if not done & bit:
            self._taken[task, key] = (done | bit, correct | (bit if right else 0))
