"""Tasks laid aside on disk, so that something can be known of all of them before the first is written."""

from __future__ import annotations

import hashlib
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from afm.datasets.schema import Task, check_writable
from afm.errors import DataError

_KEY_BYTES = 12


class Spool:
    """Tasks in a file without a name, which ends with the block; memory holds a short key of each.

    Args:
        folder: Where there is room for them; made if needed.
        path: What they are for, in errors.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self.rows = 0
        self._folder = folder
        self._path = path
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=self._folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def filled(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Lay every task aside and hand it on.

        Raises:
            DataError: An id occurs twice, a task may not be written in plain form, or there is none.
        """
        assert self._file is not None
        seen: set[bytes] = set()
        for task in tasks:
            check_writable(task)
            key = hashlib.blake2b(task.id.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()
            if key in seen:
                raise DataError(f"task id {task.id!r} occurs twice; ids must be unique", path=str(self._path))
            seen.add(key)
            pickle.dump(task, self._file, pickle.HIGHEST_PROTOCOL)
            self.rows += 1
            yield task
        if not self.rows:
            raise DataError("no tasks to write", path=str(self._path))

    def batches(self, size: int) -> Iterator[list[Task]]:
        """All of them in their order, ``size`` at a time."""
        assert self._file is not None
        self._file.seek(0)
        for begin in range(0, self.rows, size):
            count = min(size, self.rows - begin)
            yield [pickle.load(self._file) for _ in range(count)]  # written by this very object
