"""LiveCodeBench's own files, found by problem: rows for training and evaluation often hold the sample tests only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Lock
from typing import Any

from afm.errors import DataError

_ID = re.compile(rb'"question_id"\s*:\s*"([^"\\]*)"')


class PrivateTests:
    """Rows of LiveCodeBench's JSONL files by their ``question_id``; only their positions are kept in memory.

    Args:
        path: A file, or a folder of ``*.jsonl`` files; of a problem in several files the last one counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._places: dict[str, tuple[Path, int]] | None = None

    def row(self, question_id: str) -> dict[str, Any] | None:
        """The row of a problem, ``None`` when the files lack it. Blocks: for threads.

        Raises:
            DataError: There are no such files, or the row is damaged.
        """
        with self._lock:
            if self._places is None:
                self._places = self._scanned()
        place = self._places.get(question_id)
        if place is None:
            return None
        path, position = place
        with path.open("rb") as file:
            file.seek(position)
            try:
                row = json.loads(file.readline())
            except ValueError as error:
                raise DataError(f"problem {question_id!r}: damaged row ({error})", path=str(path)) from None
        if not isinstance(row, dict):
            raise DataError(f"problem {question_id!r}: expected an object", path=str(path))
        return row

    def _scanned(self) -> dict[str, tuple[Path, int]]:
        files = sorted(self._path.glob("*.jsonl")) if self._path.is_dir() else [self._path]
        if not files or not files[0].is_file():
            raise DataError(
                "no LiveCodeBench files; expected a .jsonl file or a folder of them", path=str(self._path)
            )
        places: dict[str, tuple[Path, int]] = {}
        for path in files:
            position = 0
            with path.open("rb") as file:
                for line in file:
                    if found := _ID.search(line):
                        places[found[1].decode()] = (path, position)
                    position += len(line)
        return places
