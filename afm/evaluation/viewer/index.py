"""An index of the episodes in many files, as one SQLite file.

It keeps the offset of each episode, narrow columns of numbers for filters, and a full-text index without the text. It
grows with the files, so a running job can be followed. A file that shrank or was replaced is read again.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.errors import DataError, UsageError, no_such_file
from afm.evaluation.viewer.episodes import (
    FileSums,
    answer_line,
    expected_line,
    is_storable,
    messages_of,
    one_line,
    question_key,
    read_row,
    storable,
    verdict_word,
)
from afm.sqlite import write_ahead
from afm.trajectory.io import convert_advice, json_rows, refuse_other_content

_MAX_FIRST_LINE = 64 << 20
_KEYS = {"id", "agent", "segments"}


def episode_files(path: Path) -> list[Path]:
    """Return the file, or every JSONL file below a folder whose first line is an episode, sorted by path.

    Raises:
        DataError: ``path`` does not exist, or is a file without episodes.
    """
    if path.is_dir():
        return sorted(file for file in _below(path) if _begins_with_episode(file))
    if not path.exists():
        raise DataError(
            f"{no_such_file(path, 'file or folder')}; expected episodes as JSONL, or a run's folder",
            path=str(path),
        )
    if path.stat().st_size and not _begins_with_episode(path):
        refuse_other_content(path)
        raise DataError(
            "the first line is not an episode; expected trajectory JSONL; "
            + convert_advice(path, next((row for _, row in json_rows(path)), None)),
            path=str(path),
            line=1,
        )
    return [path]


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in names if name.endswith(".jsonl"))


def _begins_with_episode(file: Path) -> bool:
    try:
        with file.open("rb") as lines:
            row = json.loads(lines.readline(_MAX_FIRST_LINE))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(row, dict) and row.keys() >= _KEYS


DEFAULT_NAME = ".afm_view.sqlite"
"""Name of an index, or its ending, where no other is chosen."""

_VERSION = 7
_BATCH_BYTES = 4 << 20
_TITLE_CHARS = 300
_TEXT_CHARS = 200_000
_TOOL_BITS = 62
_TIMEOUT_S = 30.0

NAMED = ("source", "verdict", "stop", "agent", "model", "file")
"""Columns that hold the numbers of names."""

_SCHEMA = f"""
CREATE TABLE about (version INTEGER, last INTEGER);
INSERT INTO about VALUES ({_VERSION}, 0);
CREATE TABLE files (
  id INTEGER PRIMARY KEY, path TEXT UNIQUE, inode INTEGER, indexed INTEGER, bad INTEGER DEFAULT 0, episodes INTEGER DEFAULT 0,
  scored INTEGER DEFAULT 0, passed INTEGER DEFAULT 0, calls INTEGER DEFAULT 0, tokens INTEGER DEFAULT 0,
  seconds REAL DEFAULT 0, agent TEXT DEFAULT '', model TEXT DEFAULT '');
CREATE TABLE names (id INTEGER PRIMARY KEY, kind TEXT, name TEXT, episodes INTEGER DEFAULT 0, UNIQUE (kind, name));
CREATE TABLE episodes (
  id INTEGER PRIMARY KEY, source INTEGER, verdict INTEGER, stop INTEGER, agent INTEGER, model INTEGER, file INTEGER,
  step INTEGER, score REAL, calls INTEGER, failures INTEGER, tokens INTEGER, seconds REAL, tools INTEGER, question INTEGER);
CREATE INDEX by_question ON episodes (question);
CREATE TABLE places (id INTEGER PRIMARY KEY, file INTEGER, start INTEGER, length INTEGER, name TEXT, title TEXT,
  answer TEXT, expected TEXT);
CREATE VIRTUAL TABLE texts USING fts5 (question, response, content='', tokenize='unicode61 remove_diacritics 2');
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of the files is indexed. ``bad_lines`` are lines without an episode, which are skipped."""

    episodes: int
    files: int
    bytes_done: int
    bytes_total: int
    bad_lines: int


class EpisodeIndex:
    """The index of one file or folder.

    One thread or process calls :meth:`refresh`. Any number of others read through :meth:`connect`.

    Args:
        path: A trajectory JSONL file, or a folder with trajectory files at any depth.
        place: The SQLite file. An index of another version is replaced.

    Raises:
        DataError: ``path`` does not exist, the file holds no episodes, or ``place`` cannot be written.
        UsageError: ``place`` is a file with other content.
    """

    def __init__(self, path: str | Path, place: str | Path) -> None:
        self.path = Path(path).resolve()
        self.place = Path(place)
        episode_files(self.path)
        if self._version() != _VERSION:
            self._make()

    def connect(self) -> sqlite3.Connection:
        """Open a connection for reading. The caller closes it."""
        connection = sqlite3.connect(f"{self.place.resolve().as_uri()}?mode=ro", uri=True, timeout=_TIMEOUT_S)
        connection.row_factory = sqlite3.Row
        return connection

    def refresh(self) -> Iterator[Progress]:
        """Index new lines piece by piece. Yields after each piece, so that pages can show the progress."""
        with closing(self._writer()) as connection:
            statuses = [(file, file.stat()) for file in episode_files(self.path) if file.exists()]
            done = dict.fromkeys((file for file, _ in statuses), 0)
            total = sum(status.st_size for _, status in statuses)
            with connection:
                for number, path in connection.execute("SELECT id, path FROM files").fetchall():
                    own = Path(path).is_relative_to(
                        self.path
                    )  # a copied index knows the files of its original
                    if not (own and Path(path).exists()):
                        _forget(connection, number)
            for file, status in statuses:
                with connection:
                    number, begin = _known(connection, file, status.st_ino, status.st_size)
                done[file] = begin
                for end in _pieces(connection, file, number, begin):
                    done[file] = end
                    yield _progress(connection, sum(done.values()), total)
            yield _progress(connection, sum(done.values()), total)

    def _version(self) -> int | None:
        """Return the version of the index, ``None`` where one can be made. Raises UsageError for another file."""
        if not self.place.exists() or (self.place.is_file() and not self.place.stat().st_size):
            return None
        try:
            with closing(self.connect()) as connection:
                return int(connection.execute("SELECT version, last FROM about").fetchone()[0])
        except (sqlite3.Error, TypeError, ValueError):
            if self.place.is_file() and self.place.name.endswith(DEFAULT_NAME):
                return None  # a damaged index: no other file has that name
            what = (
                "is a folder" if self.place.is_dir() else "is not an index of episodes, and was not changed"
            )
            raise UsageError(f"{self.place}: {what}; choose another --index, or remove it") from None

    def _make(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.place.with_name(self.place.name + suffix).unlink(missing_ok=True)
        self.place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with closing(self._writer()) as connection, connection:
                connection.executescript(_SCHEMA)
        except sqlite3.OperationalError as error:
            why = f"no index can be written there: {error}; choose another --index"
            raise DataError(why, path=str(self.place)) from None

    def _writer(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.place, timeout=_TIMEOUT_S)
        write_ahead(connection, timeout_s=_TIMEOUT_S)
        connection.execute("PRAGMA synchronous = OFF")  # the index can be made again from the files
        return connection


def _known(connection: sqlite3.Connection, file: Path, inode: int, size: int) -> tuple[int, int]:
    """Return the number of a file, and the offset up to which it is indexed."""
    row = connection.execute("SELECT id, inode, indexed FROM files WHERE path = ?", (str(file),)).fetchone()
    if row is not None and row[1] == inode and row[2] <= size:
        return row[0], row[2]
    if row is not None:
        _forget(connection, row[0])
    cursor = connection.execute(
        "INSERT INTO files (path, inode, indexed) VALUES (?, ?, 0)", (str(file), inode)
    )
    return cursor.lastrowid or 0, 0


def _forget(connection: sqlite3.Connection, number: int) -> None:
    """Remove a file and its episodes. Their words stay in the full-text index, but match no episode."""
    for kind in NAMED:
        connection.execute(
            f"UPDATE names SET episodes = episodes - (SELECT count(*) FROM episodes JOIN places USING (id) "
            f"WHERE places.file = ? AND episodes.{kind} = names.id) WHERE kind = ?",
            (number, kind),
        )
    connection.execute("DELETE FROM episodes WHERE id IN (SELECT id FROM places WHERE file = ?)", (number,))
    connection.execute("DELETE FROM places WHERE file = ?", (number,))
    connection.execute("DELETE FROM files WHERE id = ?", (number,))


def _pieces(connection: sqlite3.Connection, file: Path, number: int, begin: int) -> Iterator[int]:
    """Index whole lines from ``begin`` on, a few megabytes per transaction. Yields the offset after each piece."""
    names = _NameTable(connection)
    last = connection.execute("SELECT last FROM about").fetchone()[0]  # numbers are never reused
    with file.open("rb") as lines:
        lines.seek(begin)
        while piece := lines.readlines(_BATCH_BYTES):
            if not piece[-1].endswith(b"\n") and read_row(piece[-1]) is None:
                piece.pop()  # still being written: it is read once it is complete
            if not piece:
                return
            with connection:
                bad, offset, sums = 0, begin, FileSums()
                for line in piece:
                    row = read_row(line)
                    if row is None:
                        bad += bool(line.strip())
                    else:
                        last += 1
                        _insert(connection, names, last, row, (number, str(file), offset, len(line)))
                        sums.add(row)
                    offset += len(line)
                names.save()
                connection.execute("UPDATE about SET last = ?", (last,))
                connection.execute(
                    "UPDATE files SET indexed = ?, bad = bad + ? WHERE id = ?", (offset, bad, number)
                )
                sums.save(connection, number)
            begin = offset
            yield begin


def _insert(
    connection: sqlite3.Connection,
    names: _NameTable,
    number: int,
    row: dict[str, Any],
    place: tuple[int, str, int, int],
) -> None:
    file, path, start, length = place
    question = storable(str(row.get("question") or ""))
    verdict, cost = row.get("verdict") or {}, row.get("cost") or {}
    calls = [call for call in row.get("calls") or () if isinstance(call, dict)]
    named = {
        "source": row.get("data_source"),
        "verdict": verdict_word(row.get("verdict"), kept=bool(row.get("kept", True))),
        "stop": row.get("stop"),
        "agent": row.get("agent"),
        "model": row.get("model"),
        "file": path,
    }
    values = [names.number(kind, storable(str(named[kind] or ""))) for kind in NAMED]
    tools = 0
    for tool in {storable(str(call.get("tool"))) for call in calls}:
        tools |= 1 << min(names.tool(tool), _TOOL_BITS)
    provenance = row.get("provenance")
    step = provenance.get("step") if isinstance(provenance, dict) else None
    failed = sum(not call.get("ok", True) for call in calls)
    connection.execute(
        "INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            number,
            *values,
            step if isinstance(step, int) and is_storable(step) else None,
            verdict.get("score"),
            len(calls),
            failed,
            cost.get("agent_tokens", 0),
            cost.get("wall_seconds", 0.0),
            tools,
            question_key(question),
        ),
    )
    connection.execute(
        "INSERT INTO places VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(number, file, start, length, storable(str(row.get("id") or ""))),
            one_line(question, _TITLE_CHARS),
            one_line(answer_line(row, path)),
            one_line(expected_line(row.get("ground_truth"))),
        ),
    )
    text = "".join(str(part.get("text", "")) for part in row["segments"] if isinstance(part, dict))
    text = "\n".join([text, *(said for speaker, said in messages_of(provenance) if speaker)])
    connection.execute(
        "INSERT INTO texts (rowid, question, response) VALUES (?, ?, ?)",
        (number, question[:_TEXT_CHARS], storable(text[:_TEXT_CHARS])),
    )


class _NameTable:
    """Numbers of names, with the number of episodes per name."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        rows = connection.execute("SELECT kind, name, id FROM names")
        self._numbers = {(kind, name): number for kind, name, number in rows}
        numbers = sorted(number for (kind, _), number in self._numbers.items() if kind == "tool")
        self._bits = {number: bit for bit, number in enumerate(numbers)}
        self._new: dict[int, int] = {}

    def number(self, kind: str, name: str) -> int:
        """Return the number of a name, and count one more episode with it."""
        number = self._numbers.get((kind, name))
        if number is None:
            query = "INSERT INTO names (kind, name) VALUES (?, ?)"
            number = self._connection.execute(query, (kind, name)).lastrowid or 0
            self._numbers[kind, name] = number
        self._new[number] = self._new.get(number, 0) + 1
        return number

    def tool(self, name: str) -> int:
        """Return the bit of a tool: its position among the tools, ordered by number."""
        return self._bits.setdefault(self.number("tool", name), len(self._bits))

    def save(self) -> None:
        """Write the counts."""
        pairs = [(count, number) for number, count in self._new.items()]
        self._connection.executemany("UPDATE names SET episodes = episodes + ? WHERE id = ?", pairs)
        self._new.clear()


def _progress(connection: sqlite3.Connection, done: int, total: int) -> Progress:
    query = "SELECT coalesce(sum(episodes), 0) FROM names WHERE kind = 'file'"
    episodes = connection.execute(query).fetchone()[0]
    files, bad = connection.execute("SELECT count(*), coalesce(sum(bad), 0) FROM files").fetchone()
    return Progress(episodes, files, done, max(done, total), bad)
