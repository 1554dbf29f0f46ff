"""Passages: reading a corpus as a stream, the store that finds a passage by its number, and text to search terms."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import mmap
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from afm.errors import DataError

_WORD = re.compile(r"\w\w+")
_COMMON = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they this
to was will with
"""
_STOP_WORDS = frozenset(_COMMON.split())


def terms_of(text: str) -> list[str]:
    """Lower-case words of two characters or more without the most common English ones, in order."""
    return [word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]


def key_of(term: str) -> int:
    """64 bits that stand for a term; among ten million terms two share them with a chance of 3 in a million."""
    return int.from_bytes(
        hashlib.blake2b(term.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )


STORE, OFFSETS = "passages.jsonl", "passages.offsets.npy"
MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage as clients of Search-R1's server know it.

    Attributes:
        contents: The title in quotes, a line feed, the text.
    """

    id: str
    contents: str

    def line(self) -> bytes:
        """As the store holds it."""
        return (
            json.dumps({"id": self.id, "contents": self.contents}, ensure_ascii=False).encode(
                "utf-8", "replace"
            )
            + b"\n"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A passage with its place in the corpus.

    Attributes:
        line: Counted from 1.
        end: Byte after its line, in the uncompressed corpus.
    """

    passage: Passage
    line: int
    end: int


def read_corpus(path: Path, *, start: int = 0, line: int = 0) -> Iterator[Row]:
    """Stream a corpus of JSON lines ``{"id", "contents"}`` (or ``{"id", "title", "text"}``), also ``.gz``.

    Args:
        start: Byte of the uncompressed corpus to begin at, the beginning of a line.
        line: How many lines stand before it.

    Raises:
        DataError: A line is no passage, or the file ends in the middle of its compressed data.
    """
    with _opened(path) as file:
        try:
            if start:
                _skip(file, start)
            position, number = start, line
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                position += len(raw)
                if len(raw) > MAX_LINE_BYTES:
                    raise DataError(f"longer than {MAX_LINE_BYTES >> 20} MiB", path=str(path), line=number)
                if raw.strip():
                    yield Row(_passage(raw, path, number), number, position)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"broken compressed data: {error}; fetch the file again", path=str(path)
            ) from None


def _opened(path: Path) -> IO[bytes]:
    try:
        if path.suffix == ".gz":
            return io.BufferedReader(gzip.open(path, "rb"), 1 << 20)
        return path.open("rb", buffering=1 << 20)
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}; expected a corpus of JSON lines", path=str(path)
        ) from None


def _skip(file: IO[bytes], count: int) -> None:
    if not isinstance(file.raw, gzip.GzipFile):  # type: ignore[attr-defined]
        file.seek(count)
        return
    while count and (piece := file.read(min(count, 1 << 24))):
        count -= len(piece)


def _passage(raw: bytes, path: Path, number: int) -> Passage:
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"no JSON: {error}", path=str(path), line=number) from None
    if not isinstance(row, dict) or not isinstance(row.get("id"), str | int):
        raise DataError("expected an object with `id` and `contents`", path=str(path), line=number)
    contents = row.get("contents")
    if contents is None and isinstance(row.get("text"), str):
        contents = f'"{row.get("title", "")}"\n{row["text"]}'
    if not isinstance(contents, str):
        raise DataError(f"contents: got {contents!r:.60}, expected a text", path=str(path), line=number)
    return Passage(str(row["id"]), contents)


class PassageStore:
    """Passages by number, read from a memory-mapped file when asked for.

    Raises:
        DataError: It does not hold the ``expected`` number of passages.
    """

    def __init__(self, folder: Path, *, expected: int | None = None) -> None:
        import numpy as np

        self._offsets: Any = np.asarray(np.load(folder / OFFSETS, mmap_mode="r"))
        if expected is not None and len(self) != expected:
            raise DataError(
                f"names {len(self):,} passages, expected {expected:,}", path=str(folder / OFFSETS)
            )
        self._file = (folder / STORE).open("rb")
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Passage:
        row = json.loads(self.raw(number))
        return Passage(row["id"], row["contents"])

    def raw(self, number: int) -> bytes:
        """A passage as the JSON object ``{"id", "contents"}``."""
        return self._map[int(self._offsets[number]) : int(self._offsets[number + 1]) - 1]

    def range(self, begin: int, end: int) -> list[Passage]:
        """The passages from ``begin`` up to ``end``."""
        return [self[number] for number in range(begin, min(end, len(self)))]

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
        self._file.close()
