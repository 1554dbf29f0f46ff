"""Append-only JSON lines that survive ``kill -9``. Only the line being written is cut off, and a separate file keeps it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Self

from afm.errors import DataError
from afm.runs.folder import hold

_LOG = logging.getLogger(__name__)
_BLOCK_BYTES = 1 << 16


class Journal:
    """A file of JSON lines, open for appending. Use it as a context manager.

    Opening it moves an incomplete last line to ``<file>.partial``.

    Args:
        exclusive: Whether a second process is refused.
        sync: Whether each line waits for the disk.

    Attributes:
        repaired_bytes: Length of the incomplete line that was moved, else 0.
    """

    def __init__(self, path: Path, *, exclusive: bool = True, sync: bool = False) -> None:
        self.path = path
        self.repaired_bytes = 0
        self._exclusive = exclusive
        self._sync = sync
        self._file: FileIO | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab", buffering=0)
        try:
            if self._exclusive:
                hold(file.fileno(), self.path)
            self.repaired_bytes = heal(self.path)
            self._file = file
            self.give_back()
            self._read_back()
        except BaseException:
            self._file = None
            file.close()
            raise
        return self

    def _read_back(self) -> None:
        """Read the existing rows. Subclasses override it, and opening the journal calls it."""

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def fileno(self) -> int:
        """Return the descriptor of the file.

        Raises:
            ValueError: The journal is not open.
        """
        if self._file is None:
            raise ValueError(f"{self.path}: not open; use it as a context manager")
        return self._file.fileno()

    def give_back(self) -> None:
        """Free blocks that are reserved after the end of the file, for example by a process that was killed."""
        descriptor = self.fileno()
        os.ftruncate(descriptor, os.fstat(descriptor).st_size)

    def append(self, line: bytes) -> int:
        """Write one line, which includes its line feed, and return the new length of the file in bytes.

        Raises:
            OSError: The line cannot be written, for example on a full disk. The file then holds no part of it.
            ValueError: The journal is not open.
        """
        end = os.fstat(self.fileno()).st_size
        assert self._file is not None
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(end)  # otherwise the next line would continue the incomplete one
            raise
        return end + len(line)

    def append_row(self, row: dict[str, Any]) -> int:
        """Append a row as JSON. See :meth:`append`."""
        return self.append(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")


class KeyedJournal(Journal):
    """A journal of rows with a unique text under ``key``.

    Raises:
        DataError: On opening, if a complete line is not a row with a key.
    """

    def _read_back(self) -> None:
        self._rows = {row["key"]: row for _, row in read_rows(self.path, {"key": str})}

    def find(self, key: str) -> dict[str, Any] | None:
        """Return the row under ``key``, if any."""
        return self._rows.get(key)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row unless the journal has its key."""
        if row["key"] not in self._rows:
            self.append_row(row)
            self._rows[row["key"]] = row


def read_rows(path: Path, types: dict[str, type]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every complete row with its 1-based line, nothing if there is no file.

    Args:
        types: Keys that each row must have, with the types of their values.

    Raises:
        DataError: A complete line is not a row with these keys.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            row = _row(line)
            if row is None or not all(isinstance(row.get(key), kind) for key, kind in types.items()):
                raise DataError(
                    f"not a JSON object with the keys {', '.join(types)}; remove the line and run again",
                    path=str(path),
                    line=number,
                )
            yield number, row


def heal(path: Path) -> int:
    """Move an incomplete last line to ``<file>.partial`` and return its length. A complete one gets its line feed.

    Raises:
        DataError: Neither the first nor the last line begins like a row, so the file is no journal. It is left as it is.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        begin = _last_line_start(file, size)
        if begin == size:
            return 0
        file.seek(begin)
        partial = file.read()
        if _row(partial) is not None:
            file.write(b"\n")
            return 0
        file.seek(0)
        # Zeros are what a power cut leaves.
        if partial[:1] not in (b"{", b"\0") and _row(file.readline()) is None:
            got = f"got {partial[:20]!r} in the last line, expected rows of JSON"
            raise DataError(f"{got}; the file was not changed, choose another", path=str(path))
        _set_aside(path, partial)
        file.truncate(begin)
    return len(partial)


def _set_aside(path: Path, partial: bytes) -> None:
    target = path.with_name(f"{path.name}.partial")
    with target.open("ab") as file:
        file.write(partial + b"\n")
        file.flush()
        os.fsync(file.fileno())
    _LOG.warning(
        "%s: the last line was incomplete; moved its %d bytes to %s", path, len(partial), target.name
    )


def _last_line_start(file: BinaryIO, size: int) -> int:
    """Return the offset after the last line feed, which is ``size`` if the file ends with one."""
    position = size
    while position > 0:
        begin = max(0, position - _BLOCK_BYTES)
        file.seek(begin)
        line_feed = file.read(position - begin).rfind(b"\n")
        if line_feed >= 0:
            return begin + line_feed + 1
        position = begin
    return 0


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
