"""The rows of a run: several files as one stream of chunks, which can begin anywhere."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from afm.errors import DataError

_CHUNK_BYTES = 1 << 20
_CHUNK_ROWS = 512


@dataclass(frozen=True, slots=True)
class Place:
    """A place between two lines.

    Attributes:
        file: Number of the file, from 0.
        offset: Bytes of it (unpacked ones, where it is packed) that lie before.
        line: Lines of it that lie before.
    """

    file: int = 0
    offset: int = 0
    line: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some lines that follow each other in one file.

    Attributes:
        lines: With their line feeds, which the last one of a file may lack; blank ones are left out.
        numbers: Their 1-based numbers in the file.
        end: Behind them.
    """

    path: Path
    lines: tuple[bytes, ...]
    numbers: tuple[int, ...]
    end: Place


def read_chunks(paths: Sequence[Path], begin: Place) -> Iterator[Chunk]:
    """All lines from ``begin`` on, about a megabyte at a time. A file that ends in ``.gz`` is unpacked.

    Raises:
        DataError: A file cannot be read.
    """
    place = begin
    for number in range(begin.file, len(paths)):
        if number != place.file:
            place = Place(number)
        try:
            with _opened(paths[number]) as file:
                file.seek(place.offset)
                while (chunk := _next_chunk(file, paths[number], place)) is not None:
                    place = chunk.end
                    yield chunk
        except (OSError, EOFError) as error:
            raise DataError(f"cannot be read: {error}", path=str(paths[number])) from None


def _opened(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _next_chunk(file: BinaryIO, path: Path, begin: Place) -> Chunk | None:
    lines: list[bytes] = []
    numbers: list[int] = []
    size = read = 0
    while size < _CHUNK_BYTES and read < _CHUNK_ROWS:
        line = file.readline()
        if not line:
            break
        size += len(line)
        read += 1
        if line.strip():
            lines.append(line)
            numbers.append(begin.line + read)
    if not read:
        return None
    end = Place(begin.file, begin.offset + size, begin.line + read)
    return Chunk(path, tuple(lines), tuple(numbers), end)
