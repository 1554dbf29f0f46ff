"""Files of one format as files of another, row by row."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.errors import DataError, UsageError
from afm.trajectory.convert.base import Context, Format, Item, Read
from afm.trajectory.convert.registry import FORMATS
from afm.trajectory.io import raw_lines
from afm.trajectory.record import Record
from afm.trajectory.rows import json_rows

_WHOLE_BYTES = 256 << 20
"""A larger file that is one JSON object over many lines is not read."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion did.

    Attributes:
        bad: Rows that could not be converted, each with file and line.
        lost: What rows held that the result does not, and in how many.
        refused: Trajectories that their agent's rules refuse; they are marked ``kept: false``.
    """

    rows: int
    bad: tuple[DataError, ...]
    lost: Mapping[str, int]
    refused: int


def convert_file(
    source: Path, read_as: Format, target: Path, write_as: Format, context: Context, *, array: bool = False
) -> Converted:
    """Write the rows of ``source`` that can be converted in another format; ``target`` is replaced.

    A row without an id gets :attr:`Record.identity`.

    Args:
        array: Write one JSON array, not JSONL.

    Raises:
        DataError: The file cannot be opened.
        UsageError: The format is only read.
    """
    if not write_as.writable:
        raise UsageError(f"--to {write_as.name}: it is only read")
    bad: list[DataError] = []
    lost: Counter[str] = Counter()
    rows = refused = 0
    with target.open("w", encoding="utf-8") as file:
        for line, found in read_converted(source, read_as, context):
            if isinstance(found, DataError):
                bad.append(found)
                continue
            try:
                text = _written(found.record, write_as, context)
            except DataError as error:
                bad.append(DataError(error.message, path=str(source), line=line))
                continue
            lost.update(found.lost)
            refused += not found.record.kept
            file.write((("[\n" if rows == 0 else ",\n") if array else "") + text + ("" if array else "\n"))
            rows += 1
        if array:
            file.write("\n]\n" if rows else "[]\n")
    if rows and write_as.loses and (context.bare or not write_as.keeps):
        lost[write_as.loses] += rows
    return Converted(rows, tuple(bad), dict(lost), refused)


def _written(record: Record, write_as: Format, context: Context) -> str:
    named = record.model_copy(update={"id": record.identity})
    text = json.dumps(write_as.write(named, context), ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"half a character ({error.object[error.start]!r}) cannot be written") from None
    return text


def read_converted(path: Path, read_as: Format, context: Context) -> Iterator[tuple[int, Read | DataError]]:
    """Each row of a file with its line, read, or why it could not be.

    Raises:
        DataError: The file cannot be opened.
    """
    for line, row in read_as.gathered(rows_of(path)):
        if isinstance(row, DataError):
            yield line, row
            continue
        try:
            yield line, read_as.read(row, context)
        except DataError as error:
            yield line, DataError(error.message, path=str(path), line=line)


def detected(path: Path) -> Format:
    """The format of a file, by its first row.

    Raises:
        DataError: It is none that is known.
    """
    for line, row in rows_of(path):
        if isinstance(row, DataError):
            raise row
        for found in FORMATS.values():
            if found.known(row):
                return found
        shown = f"the keys {sorted(row)[:8]}" if isinstance(row, dict) else type(row).__name__
        raise DataError(
            f"got {shown}, which no format has; say --from {', '.join(FORMATS)}", path=str(path), line=line
        )
    raise DataError("holds no rows", path=str(path))


def rows_of(path: Path) -> Iterator[Item]:
    """Decoded rows of JSONL or of a JSON array; a file that is one object, or one conversation, is one row.

    Lines that are lists of messages or steps are rows, too.
    """
    first = _first_line(path)
    line = _json(first)
    if first[:1] == b"{" and line is None:
        whole = _json(_all(path))
        yield from json_rows(path) if whole is None else [(1, whole)]
    elif isinstance(line, list) and line and _is_part(line[0]):
        for number, text in raw_lines(path):
            if text.strip():
                row = _json(text)
                error = DataError("no JSON", path=str(path), line=number)
                yield number, error if row is None else row
    elif first[:1] == b"[" and line is None and _is_part(next((row for _, row in json_rows(path)), None)):
        whole = _json(_all(path))
        yield 1, DataError("no JSON", path=str(path), line=1) if whole is None else whole
    else:
        yield from json_rows(path)


def _first_line(path: Path) -> bytes:
    for _, line in raw_lines(path):
        if line.strip().removeprefix(BOM_UTF8):
            return line.strip().removeprefix(BOM_UTF8)
    return b""


def _all(path: Path) -> bytes:
    """The whole of a file that may be one row; nothing of one that is too large for that."""
    return path.read_bytes().removeprefix(BOM_UTF8) if path.stat().st_size <= _WHOLE_BYTES else b""


def _is_part(item: Any) -> bool:
    """Whether an element of an array is a message or a step, so that the array is one conversation."""
    keys = ("role", "step_number", "model_output", "task", "plan")
    return (
        isinstance(item, dict) and any(key in item for key in keys) and not {"steps", "messages"} & set(item)
    )


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
