"""Files of records: JSON lines, append only, one flushed line a record; and the advantages that belong to one."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from afm.errors import DataError
from afm.trajectory.record import Record

_log = logging.getLogger(__name__)
_BLOCK_BYTES = 1 << 16


def read_records(path: str | Path) -> Iterator[Record | DataError]:
    """Yield each line's record, or for a bad line its error with path and line number; blank lines pass.

    Raises:
        DataError: The file cannot be opened.
    """
    return (item for _, item in numbered_records(path))


def numbered_records(path: str | Path) -> Iterator[tuple[int, Record | DataError]]:
    """:func:`read_records`, each with its 1-based line."""
    for number, line in raw_lines(Path(path)):
        if not line.strip():
            continue
        try:
            yield number, record_of_line(line)
        except DataError as error:
            yield number, DataError(error.message, path=str(path), line=number)


def load_records(path: str | Path) -> list[Record]:
    """All records of a file.

    Raises:
        DataError: The first bad line.
    """
    records = []
    for item in read_records(path):
        if isinstance(item, DataError):
            raise item
        records.append(item)
    return records


class RecordWriter:
    """Appends records to a JSONL file; for one writer at a time.

    Each record is one flushed line, so a killed process leaves at most one partial line, the last. Opening
    the file again moves that line to ``<file>.partial`` and says so in the log.

    Attributes:
        path: The file.
        repaired_bytes: Length of the partial line that was moved away, 0 when there was none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.repaired_bytes = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> RecordWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.repaired_bytes = _repair(self.path)
        self._file = self.path.open("ab")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, record: Record) -> int:
        """Append one record and hand it to the operating system; returns the length of the file now, in bytes.

        Raises:
            DataError: The record holds something that JSON cannot express.
            ValueError: The writer is not open.
        """
        if self._file is None:
            raise ValueError(f"{self.path}: the writer is not open; use it as a context manager")
        self._file.write(line_of_record(record, self.path))
        self._file.flush()
        return self._file.tell()


def append_record(path: str | Path, record: Record) -> None:
    """Append one record to a file that several processes of a machine write at once: a line is one write.

    Raises:
        DataError: The record holds something that JSON cannot express.
    """
    line = line_of_record(record, Path(path))
    with Path(path).open("ab", buffering=0) as file:
        file.write(line)


def line_of_record(record: Record, path: Path | None = None) -> bytes:
    """A record as one line with its line feed; ``path`` names its file in errors.

    Raises:
        DataError: The record holds something that JSON cannot express.
    """
    try:
        return record.model_dump_json().encode() + b"\n"
    except (PydanticSerializationError, UnicodeEncodeError) as error:
        raise DataError(
            f"record {record.id!r} cannot be written: {error}", path=None if path is None else str(path)
        ) from None


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines of a file with their 1-based numbers, one in memory at a time.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            yield from enumerate(file, start=1)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=str(path)) from None


def record_of_line(line: bytes) -> Record:
    """The record of one line.

    Raises:
        DataError: It is none; without file and line number.
    """
    try:
        return Record.model_validate_json(line)
    except ValidationError as error:
        cut = "" if line.endswith(b"\n") else " (a half-written last line?)"
        raise DataError(explain(error) + cut) from None


def explain(error: ValidationError) -> str:
    """The first fault of a record in one line: key, value, what was expected."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f"no valid JSON: {first['ctx']['error']}"
    key = ".".join(str(part) for part in first["loc"]) or "row"
    shown = repr(first["input"])
    more = f" (and {error.error_count() - 1} more faults)" if error.error_count() > 1 else ""
    return f"{key}: got {shown[:80]}: {first['msg']}{more}"


def _repair(path: Path) -> int:
    """Move a partial last line away and return its length in bytes."""
    if not path.exists() or path.stat().st_size == 0:
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        begin = _last_line_start(file, size)
        if begin == size:
            return 0
        file.seek(begin)
        partial = file.read()
        if _is_record(partial):
            file.write(b"\n")
            return 0
        _keep_partial(path, partial)
        file.truncate(begin)
    return len(partial)


def _keep_partial(path: Path, partial: bytes) -> None:
    target = path.with_name(f"{path.name}.partial")
    with target.open("ab") as file:
        file.write(partial + b"\n")
        file.flush()
        os.fsync(file.fileno())
    _log.warning(
        "%s: its last line was only half written; moved %d bytes to %s", path, len(partial), target.name
    )


def _last_line_start(file: BinaryIO, size: int) -> int:
    """Offset just behind the last line feed; ``size`` when the file ends with one."""
    position = size
    while position > 0:
        begin = max(0, position - _BLOCK_BYTES)
        file.seek(begin)
        found = file.read(position - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        position = begin
    return 0


def _is_record(line: bytes) -> bool:
    try:
        record_of_line(line)
    except DataError:
        return False
    return True


ADVANTAGES_SUFFIX = ".advantages.json"

Advantages = float | list[float]


def advantages_file(episodes: Path) -> Path:
    """Where the advantages of a file's episodes stand."""
    return episodes.with_suffix(ADVANTAGES_SUFFIX)


def load_advantages(episodes: Path) -> Mapping[str, Any]:
    """By the episodes' ids; empty where nobody wrote any.

    Raises:
        DataError: The file is no JSON object.
    """
    file = advantages_file(episodes)
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", path=str(file)) from None
    if not isinstance(found, dict):
        raise DataError(
            f"got {type(found).__name__}, expected an object with the ids of episodes", path=str(file)
        )
    return found
