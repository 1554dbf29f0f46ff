"""How far a run has read its files, and how far it is: one SQLite file that a kill leaves whole.

Nothing waits for the disk before the end: what the system has been given outlives the process. A power failure may lose some of it.
A damaged index and files that end too early are noticed when the run resumes.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from afm.distill.filters.base import Funnel
from afm.errors import ConfigError, DataError

_CHUNK_BYTES = 1 << 20
_CHUNK_ROWS = 512


@dataclass(frozen=True, slots=True)
class FilePosition:
    """A place between two lines: the file by its number from 0, and the (unpacked) bytes and lines of it that lie before."""

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
    end: FilePosition


def read_chunks(paths: Sequence[Path], begin: FilePosition) -> Iterator[Chunk]:
    """All lines from ``begin`` on, about a megabyte at a time. A file that ends in ``.gz`` is unpacked.

    Raises:
        DataError: A file cannot be read.
    """
    place = begin
    for number in range(begin.file, len(paths)):
        if number != place.file:
            place = FilePosition(number)
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


def _next_chunk(file: BinaryIO, path: Path, begin: FilePosition) -> Chunk | None:
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
    end = FilePosition(begin.file, begin.offset + size, begin.line + read)
    return Chunk(path, tuple(lines), tuple(numbers), end)


_CACHE_KIB = 32 * 1024


@dataclass
class RunProgress:
    """What is done for good.

    Attributes:
        place: Behind the last line that was dealt with.
        rows: Lines dealt with, blank ones aside.
        sizes: Bytes of each output file that belong to these rows.
    """

    place: FilePosition = field(default_factory=FilePosition)
    rows: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    funnel: Funnel = field(default_factory=Funnel)

    def dumped(self) -> str:
        """As text; :meth:`parsed` reads it."""
        return json.dumps(
            {
                "place": asdict(self.place),
                "rows": self.rows,
                "sizes": self.sizes,
                "funnel": self.funnel.as_json(),
            }
        )

    @classmethod
    def parsed(cls, text: str, order: tuple[str, ...]) -> RunProgress:
        """What :meth:`dumped` wrote."""
        data = json.loads(text)
        funnel = Funnel.from_json(data["funnel"], order)
        return cls(FilePosition(**data["place"]), data["rows"], data["sizes"], funnel)


class RunState:
    """The file, held by one process at a time.

    What happens between two calls of :meth:`save` happens together or not at all, also in the tables that
    others keep on :attr:`connection`.

    Raises:
        ConfigError: Another process holds it, or it is damaged.
    """

    def __init__(self, path: Path, order: tuple[str, ...]) -> None:
        self.path = path
        self._order = order
        self.connection = sqlite3.connect(path, isolation_level=None, timeout=0)
        try:
            self.connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute(
                "PRAGMA synchronous = OFF"
            )  # 20 ms a chunk otherwise, more than its rows take
            self.connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            self.connection.execute(
                "CREATE TABLE IF NOT EXISTS progress (id INTEGER PRIMARY KEY, value TEXT)"
            )
            self.connection.execute("BEGIN IMMEDIATE")
        except sqlite3.DatabaseError as error:
            self.connection.close()
            if "locked" in str(error):
                raise ConfigError(
                    f"{path.parent}: another run is writing here; wait for it or stop it"
                ) from None
            if isinstance(error, sqlite3.OperationalError):
                raise
            raise self._damaged(str(error)) from None

    def __enter__(self) -> RunState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()  # what was not saved is rolled back

    def progress(self) -> RunProgress:
        """What was saved last; a fresh start if nothing was.

        Raises:
            ConfigError: The file is damaged.
        """
        try:
            row = self.connection.execute("SELECT value FROM progress").fetchone()
            if row is None:
                return RunProgress(funnel=Funnel(order=self._order))
            (result,) = self.connection.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            result = str(error)
        if result != "ok":
            raise self._damaged(result)
        return RunProgress.parsed(row[0], self._order)

    def save(self, progress: RunProgress) -> None:
        """Make everything since the last call permanent."""
        self.connection.execute("INSERT OR REPLACE INTO progress VALUES (1, ?)", (progress.dumped(),))
        self.connection.execute("COMMIT")
        self.connection.execute("BEGIN IMMEDIATE")

    def _damaged(self, how: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: damaged ({how.splitlines()[-1]}), as a power failure may leave it; remove the folder and start again"
        )

    def remove(self) -> None:
        """Delete the file: the run is complete."""
        self.connection.close()
        remove_state(self.path)


def remove_state(path: Path) -> None:
    """Delete the file of a complete run, if it is there, and what SQLite keeps beside it."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
