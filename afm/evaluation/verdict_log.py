"""What a judge said in one evaluation, a line each: nothing that is in the file is asked again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO


class VerdictLog:
    """A JSONL file of rows with a ``key``, for one writer at a time.

    A row is written whole and at once, so a killed process leaves at most one broken line; such lines are passed over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[str, dict[str, Any]] = {}
        self._file: BinaryIO | None = None

    def __enter__(self) -> VerdictLog:
        broken = False
        if self.path.exists():
            data = self.path.read_bytes()
            broken = bool(data) and not data.endswith(b"\n")
            self._rows = {row["key"]: row for line in data.splitlines() if (row := _row(line)) is not None}
        self._file = self.path.open("ab")
        if broken:
            self._file.write(b"\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def find(self, key: str) -> Mapping[str, Any] | None:
        """The row of an earlier verdict."""
        return self._rows.get(key)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a verdict.

        Raises:
            ValueError: The log is not open.
        """
        if self._file is None:
            raise ValueError("the log is not open; use it in a with statement")
        self._rows[row["key"]] = row
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("key"), str) else None
