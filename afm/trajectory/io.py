"""Files of records: JSON lines, append only, one flushed line a record; and the advantages that belong to one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from afm.errors import DataError
from afm.runs.journal import Journal
from afm.trajectory.record import Record


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

    A killed process leaves at most one partial line, the last. Opening the file again moves that line to
    ``<file>.partial`` and says so in the log.

    Attributes:
        path: The file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._journal = Journal(self.path, exclusive=False)

    @property
    def repaired_bytes(self) -> int:
        """Length of the partial line that was moved away, 0 when there was none."""
        return self._journal.repaired_bytes

    def __enter__(self) -> RecordWriter:
        self._journal.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.__exit__()

    def write(self, record: Record) -> int:
        """Append one record and hand it to the operating system; returns the length of the file now, in bytes.

        Raises:
            DataError: The record holds something that JSON cannot express.
            ValueError: The writer is not open.
        """
        return self._journal.append(line_of_record(record, self.path))


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
