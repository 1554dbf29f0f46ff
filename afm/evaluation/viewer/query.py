"""Queries of an index: episodes, counts, and the values of filters."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from afm.evaluation.viewer.index import NAMED

MAX_FOUND = 10_000
"""Limit on the episodes that a full-text search counts."""
_MAX_SORTED = 100_000
"""Limit on the episodes that are sorted by the rank of their file for each page of the list."""

_WORD = re.compile(r'"([^"]+)"|(\S+)')


class Order(StrEnum):
    """Order of a list of episodes."""

    FILE = "file"
    NEWEST = "newest"
    SLOWEST = "slowest"
    LONGEST = "longest"
    CALLS = "calls"
    STEP = "step"


_ORDERS = {
    Order.FILE: "id",
    Order.NEWEST: "id DESC",
    Order.SLOWEST: "seconds DESC, id",
    Order.LONGEST: "tokens DESC, id",
    Order.CALLS: "calls DESC, id",
    Order.STEP: "step DESC, id",
}


@dataclass(frozen=True, slots=True)
class Filters:
    """Conditions for episodes in a list. Empty filters list all.

    Attributes:
        names: Wanted name by column of :data:`afm.evaluation.viewer.index.NAMED`, or by ``tool``.
        text: Words and "phrases". Question, response and messages together must hold all of them.
        question: Key of a question, for all its episodes.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    text: str = ""
    question: int | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """A page of a list of episodes.

    Attributes:
        capped: Whether there are more than ``total`` episodes. A text search counts at most :data:`MAX_FOUND`.
    """

    rows: tuple[dict[str, Any], ...]
    total: int
    capped: bool = False


def listing(
    connection: sqlite3.Connection,
    filters: Filters,
    *,
    order: Order = Order.FILE,
    offset: int = 0,
    limit: int = 100,
    first: Sequence[str] = (),
) -> Listing:
    """Return rows ``offset`` to ``offset + limit`` of the filtered episodes.

    In the order of files, those of the files ``first`` come first, unless there are too many to sort for each page.
    """
    where, values = _where(connection, filters)
    if where is None:
        return Listing((), 0)
    total, capped = _count(connection, where, values, bounded=bool(filters.text.strip()))
    keys = _ORDERS[order]
    if order is Order.FILE and first and "file" not in filters.names and total <= _MAX_SORTED:
        names = dict(connection.execute("SELECT name, id FROM names WHERE kind = 'file'").fetchall())
        ranks = [f"WHEN {names[path]} THEN {rank}" for rank, path in enumerate(first) if path in names]
        keys = f"CASE file {' '.join(ranks)} ELSE {len(first)} END, {keys}" if ranks else keys
    ids = connection.execute(
        f"SELECT id FROM episodes {where} ORDER BY {keys} LIMIT ? OFFSET ?",
        (*values, max(0, min(limit, 500)), max(0, offset)),
    )
    return Listing(tuple(episode_row(connection, row[0]) for row in ids.fetchall()), total, capped)


def episode_row(connection: sqlite3.Connection, number: int) -> dict[str, Any]:
    """Return the facts of one episode, with names in place of their numbers.

    Raises:
        KeyError: There is no such episode.
    """
    query = "SELECT * FROM episodes JOIN places USING (id) WHERE id = ?"
    row = connection.execute(query, (number,)).fetchone()
    if row is None:
        raise KeyError(number)
    plain = (
        "id",
        "name",
        "title",
        "answer",
        "expected",
        "step",
        "score",
        "calls",
        "failures",
        "tokens",
        "seconds",
    )
    facts = {key: row[key] for key in plain}
    facts["question"] = str(row["question"])  # too large for a number in JavaScript
    marks = ", ".join("?" * len(NAMED))
    numbers = connection.execute(
        f"SELECT {', '.join(NAMED)} FROM episodes WHERE id = ?", (number,)
    ).fetchone()
    names = dict(
        connection.execute(f"SELECT id, name FROM names WHERE id IN ({marks})", tuple(numbers)).fetchall()
    )
    return facts | {kind: names.get(numbers[kind], "") for kind in NAMED}


def place_of(connection: sqlite3.Connection, number: int) -> tuple[str, int, int]:
    """Return path, offset and length in bytes of an episode's line.

    Raises:
        KeyError: There is no such episode.
    """
    row = connection.execute(
        "SELECT path, start, length FROM places JOIN files ON files.id = places.file WHERE places.id = ?",
        (number,),
    ).fetchone()
    if row is None:
        raise KeyError(number)
    return row[0], row[1], row[2]


def numbered(connection: sqlite3.Connection, name: str, file: str = "") -> int | None:
    """Return the number of the episode ``name`` in a file whose path ends with ``file``. ``None`` if it is not indexed."""
    query = (
        "SELECT places.id FROM places JOIN files ON files.id = places.file "
        "WHERE name = ? AND (? = '' OR path = ? OR substr(path, -length(?)) = ?) ORDER BY places.id LIMIT 1"
    )
    end = f"/{file}"
    row = connection.execute(query, (name, file, file, end, end)).fetchone()
    return None if row is None else int(row[0])


def file_rows(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return every indexed file with episodes, and the sums over its episodes."""
    query = "SELECT * FROM files WHERE episodes > 0 ORDER BY id"
    return [dict(row) for row in connection.execute(query)]


def facets(connection: sqlite3.Connection) -> dict[str, list[dict[str, Any]]]:
    """Return the names of each column with their number of episodes, the most frequent first."""
    names: dict[str, list[dict[str, Any]]] = {kind: [] for kind in (*NAMED, "tool")}
    query = "SELECT kind, name, episodes FROM names WHERE episodes > 0 ORDER BY episodes DESC, name"
    for kind, name, episodes in connection.execute(query):
        if kind in names:
            names[kind].append({"name": name, "episodes": episodes})
    return names


def match_words(text: str) -> str:
    """Turn typed text into a query of FTS5 that needs every word and every "phrase"."""
    # SQLite ends a query at a NUL
    parts = [phrase or word for phrase, word in _WORD.findall(text.replace("\0", " "))]
    quoted = ('"' + part.replace('"', '""') + '"' for part in parts if any(map(str.isalnum, part)))
    return " ".join(quoted)


def _where(connection: sqlite3.Connection, filters: Filters) -> tuple[str | None, tuple[Any, ...]]:
    """Return the SQL condition, ``None`` if no episode can match."""
    conditions = list(_conditions(connection, filters))
    if any(condition is None for condition in conditions):
        return None, ()
    kept = [condition for condition in conditions if condition is not None]
    where = f"WHERE {' AND '.join(text for text, _ in kept)}" if kept else ""
    return where, tuple(value for _, value in kept)


def _conditions(connection: sqlite3.Connection, filters: Filters) -> Iterator[tuple[str, Any] | None]:
    for kind, name in filters.names.items():
        if kind == "tool":
            yield _tool_condition(connection, name)
            continue
        row = connection.execute("SELECT id FROM names WHERE kind = ? AND name = ?", (kind, name)).fetchone()
        yield (f"+{kind} = ?", row[0]) if kind in NAMED and row else None
    if filters.step is not None:
        yield "step = ?", filters.step
    if filters.question is not None:
        yield "question = ?", filters.question
    if filters.text.strip():
        words = match_words(filters.text)
        yield ("id IN (SELECT rowid FROM texts WHERE texts MATCH ?)", words) if words else None


def _tool_condition(connection: sqlite3.Connection, name: str) -> tuple[str, Any] | None:
    tools = [row[0] for row in connection.execute("SELECT name FROM names WHERE kind = 'tool' ORDER BY id")]
    return ("tools & ? != 0", 1 << min(tools.index(name), 62)) if name in tools else None


def _count(
    connection: sqlite3.Connection, where: str, values: tuple[Any, ...], *, bounded: bool
) -> tuple[int, bool]:
    if not where:
        query = "SELECT coalesce(sum(episodes), 0) FROM names WHERE kind = 'file'"
        return connection.execute(query).fetchone()[0], False
    if not bounded:
        return connection.execute(f"SELECT count(*) FROM episodes {where}", values).fetchone()[0], False
    query = f"SELECT count(*) FROM (SELECT 1 FROM episodes {where} LIMIT {MAX_FOUND + 1})"
    count = connection.execute(query, values).fetchone()[0]
    return min(count, MAX_FOUND), count > MAX_FOUND
