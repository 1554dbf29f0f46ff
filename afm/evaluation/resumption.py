"""Which episodes of a run are finished: known within a second for a million of them, whatever their size.

Beside ``episodes.jsonl`` stands ``episodes.index``: a line of 15 bytes and the id for every episode, written after it. A
start reads the index and only those episodes that are behind its end; one that does not fit the file is made anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from afm.errors import DataError
from afm.evaluation.play import has_score
from afm.trajectory.io import RecordWriter, raw_lines, record_of_line
from afm.trajectory.record import Record

INDEX_SUFFIX = ".index"
_HEAD = 15
"""14 hexadecimal digits of the byte behind the episode, and whether it has a score: ``+`` or ``-``."""
_KEYS = re.compile(rf"^.{{{_HEAD}}}(.*)$", re.MULTILINE)
_UNSCORED = re.compile(rb"\n.{%d}-" % (_HEAD - 1))
_DAMAGED = re.compile(rb"\n(?![0-9a-f]{%d}[+-])(?!\Z)" % (_HEAD - 1))
_COPIED_BYTES = 1 << 24


class FinishedEpisodes:
    """The episodes file of one evaluation, as earlier starts left it and as this one goes on with it.

    Opening it moves a half-written last line away, and forgets episodes without a score. Use it as a context manager.

    Args:
        path: ``episodes.jsonl``.

    Attributes:
        ids: Of the episodes of earlier starts.
        count: How many they are.

    Raises:
        DataError: A line that is read is no record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index = path.with_suffix(INDEX_SUFFIX)
        self._writer = RecordWriter(path)
        self._log: BinaryIO | None = None
        with self._writer:
            pass  # moves a half-written last line away
        known = self._known()
        if _UNSCORED.search(b"\n" + known):
            known = self._keep_scored(known)
        self._end = path.stat().st_size
        self.ids = _ids(known)
        self.count = known.count(b"\n")

    def __contains__(self, episode: str) -> bool:
        return episode in self.ids

    def __enter__(self) -> FinishedEpisodes:
        self._writer.__enter__()
        self._log = self._index.open("ab")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)
        if self._log is not None:
            self._log.close()
            self._log = None

    def write(self, record: Record, *, scored: bool) -> None:
        """Append one episode; ``record`` may be sealed, so the caller says whether it has a score.

        Raises:
            ValueError: It is not open.
        """
        if self._log is None:
            raise ValueError(f"{self._path}: not open; use it as a context manager")
        end = self._writer.write(record)
        self._log.write(_line(end, scored, record.id) + b"\n")
        self._log.flush()

    def records(self) -> Iterator[Record]:
        """The episodes of earlier starts, one in memory at a time.

        Raises:
            DataError: A line is no record; names file and line.
        """
        seen = 0
        for number, line in raw_lines(self._path):
            if seen >= self._end:
                return
            seen += len(line)
            if line.strip():
                yield _record(line, self._path, number)

    def _known(self) -> bytes:
        """Lines of the index, each with its line feed, for all that the file holds."""
        size = self._path.stat().st_size
        known = self._read_index(size)
        end = _end(_last_lines(known)[-1]) if known else 0
        if end == size and self._index.exists():
            return known
        added = []
        with self._index.open("ab" if known else "wb") as log:
            for line in self._unknown(end):
                log.write(line + b"\n")
                added.append(line + b"\n")
        return b"".join([known, *added])

    def _read_index(self, size: int) -> bytes:
        """The whole lines of the index, when it is of this file; else none."""
        if not self._index.exists():
            return b""
        known = self._index.read_bytes()
        if torn := len(known) - known.rfind(b"\n") - 1:
            known = known[:-torn]
            os.truncate(self._index, len(known))
        return known if _sound(known) and self._fits(_last_lines(known), size) else b""

    def _fits(self, lines: list[bytes], size: int) -> bool:
        """Whether the last episode of the index stands in the file where the index says."""
        try:
            end = _end(lines[-1])
            begin = _end(lines[-2]) if len(lines) > 1 else 0
        except (IndexError, ValueError):
            return False
        if not begin < end <= size:
            return False
        with self._path.open("rb") as file:
            file.seek(begin)
            found = file.read(end - begin)
        try:
            return found.count(b"\n") == 1 and _key(record_of_line(found).id) == lines[-1][_HEAD:]
        except DataError:
            return False

    def _unknown(self, begin: int) -> Iterator[bytes]:
        """Lines of the index for what stands behind ``begin``."""
        with self._path.open("rb") as file:
            file.seek(begin)
            for line in file:
                begin += len(line)
                if line.strip():
                    record = self._record_before(begin, line)
                    yield _line(begin, has_score(record), record.id)

    def _record_before(self, end: int, line: bytes) -> Record:
        """The record of the line that ends there; which one it is, is counted for an error alone."""
        try:
            return record_of_line(line)
        except DataError as error:
            with self._path.open("rb") as file:
                number = sum(1 for _ in _lines_until(file, end))
            raise DataError(error.message, path=str(self._path), line=number) from None

    def _keep_scored(self, known: bytes) -> bytes:
        """Replace the file by one that holds its scored episodes only, without reading them."""
        fresh, log = (path.with_name(f"{path.name}.scored") for path in (self._path, self._index))
        kept: list[bytes] = []
        with self._path.open("rb") as old, fresh.open("wb") as new:
            begin = position = dropped = 0
            for line in known[:-1].split(b"\n"):
                end = _end(line)
                if line[_HEAD - 1 : _HEAD] == b"+":
                    kept.append(b"%014x+%s\n" % (end - dropped, line[_HEAD:]))
                else:
                    _copy(old, new, begin, position - begin)
                    dropped += end - position
                    begin = end
                position = end
            _copy(old, new, begin, self._path.stat().st_size - begin)
        scored = b"".join(kept)
        log.write_bytes(scored)
        self._index.unlink(missing_ok=True)  # killed here, the next start makes it anew
        fresh.replace(self._path)
        log.replace(self._index)
        return scored


def _copy(old: BinaryIO, new: BinaryIO, begin: int, length: int) -> None:
    if length > 0:
        old.seek(begin)
        while length > 0:
            piece = old.read(min(length, _COPIED_BYTES))
            new.write(piece)
            length -= len(piece)


def _lines_until(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Lines up to a position; the file stands there afterwards."""
    while file.tell() < end:
        yield file.readline()


def _line(end: int, scored: bool, episode: str) -> bytes:
    return b"%014x%s%s" % (end, b"+" if scored else b"-", _key(episode))


def _end(line: bytes) -> int:
    """Where the episode of a line of the index ends."""
    return int(line[: _HEAD - 1], 16)


def _last_lines(known: bytes) -> list[bytes]:
    """The last two lines of the index, or the one that there is."""
    begin = known.rfind(b"\n", 0, max(0, known.rfind(b"\n", 0, -1)))
    return known[begin + 1 : -1].split(b"\n")


def _sound(known: bytes) -> bool:
    """Whether each line has the form of one."""
    try:
        known.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return not _DAMAGED.search(b"\n" + known)


def _ids(known: bytes) -> frozenset[str]:
    """What :func:`_key` made the keys of."""
    keys = _KEYS.findall(known.decode("utf-8", "surrogatepass"))
    return frozenset(map(_unescaped, keys) if b"\\" in known else keys)


def _unescaped(key: str) -> str:
    return "\\".join(part.replace("\\n", "\n") for part in key.split("\\\\"))


def _key(episode: str) -> bytes:
    """An id without line feeds."""
    key = episode.encode("utf-8", "surrogatepass")
    return key.replace(b"\\", b"\\\\").replace(b"\n", b"\\n") if b"\\" in key or b"\n" in key else key


def _record(line: bytes, path: Path, number: int) -> Record:
    try:
        return record_of_line(line)
    except DataError as error:
        raise DataError(error.message, path=str(path), line=number) from None
