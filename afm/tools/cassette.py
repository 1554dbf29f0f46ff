"""Recording and replay of tool calls, which gives the same answers in evaluation and in training at no cost.

A cassette is one SQLite file (:class:`Cassette`). In a tools YAML::

    cassette: {file: runs/gaia.cassette, mode: replay, on_miss: error}
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sqlite3
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from afm.configuration import Settings
from afm.errors import ConfigError, ReplayError
from afm.sqlite import write_ahead
from afm.tools.base import ContextTool, Tool, ToolResult
from afm.tools.secrets import Secrets

_SCHEMA_VERSION = 2
_COLUMNS = "tool, argument, text, ok, meta, version, recorded_at, context"
_CREATE = (
    "CREATE TABLE calls (tool TEXT, argument TEXT, text TEXT, ok INTEGER, meta TEXT, version TEXT, recorded_at REAL, "
    "context TEXT, PRIMARY KEY (tool, argument, context))"
)
_FIND = (
    f"SELECT {_COLUMNS} FROM calls WHERE tool = ?1 AND argument = ?2 AND (context IN (?3, '') OR ?4) "
    "ORDER BY context = ?3 DESC, context = '' DESC, recorded_at DESC LIMIT 1"
)
_BUSY_TIMEOUT_S = 30.0
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call on a cassette.

    Attributes:
        version: Digest of the tool's class and settings at the time of the recording.
        recorded_at: Seconds since the epoch.
        context: What the answer depends on in addition to the argument. Empty if that is nothing or unknown.
    """

    tool: str
    argument: str
    result: ToolResult
    version: str
    recorded_at: float
    context: str = ""


def normalised(argument: str) -> str:
    """Return an argument without differences that tools ignore: Unicode form, line ends, spaces at line ends."""
    lines = unicodedata.normalize("NFC", argument).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip()


class Cassette:
    """The recorded calls in one file.

    Args:
        path: The file, which the first recorded call creates.
        readonly: Require that the file exists.
        secrets: Environment variables whose values are secret although their names do not show it.

    Raises:
        ConfigError: The file is missing although ``readonly`` is set, or it is not a cassette of this version.
    """

    def __init__(self, path: Path, *, readonly: bool = False, secrets: Iterable[str] = ()) -> None:
        if readonly and not path.is_file():
            raise ConfigError(
                f"{path}: no such cassette; record one with `cassette: {{file: ..., mode: record}}`"
            )
        self._path = path
        self._secrets = Secrets(secrets)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        if path.is_file():
            with self._opened():
                pass

    async def find(
        self, tool: str, argument: str, context: str = "", *, any_context: bool = False
    ) -> Recorded | None:
        """Return the recorded call of this context, else one without context, else ``None``.

        Args:
            any_context: As a last resort, return the latest call of another context.
        """
        key = (tool, self._cleaned(argument), self._cleaned(context), any_context)
        return await asyncio.to_thread(self._find, key)

    async def add(self, call: Recorded) -> None:
        """Record a call without its secrets (:class:`afm.tools.secrets.Secrets`). It replaces an equal one."""
        await asyncio.to_thread(self._add, call)

    def same(self, recorded: str, text: str) -> bool:
        """Return whether ``text`` equals the ``recorded`` one after the cassette's normalisation."""
        return recorded == self._cleaned(text)

    def calls(self) -> Iterator[Recorded]:
        """Yield every call, the oldest first."""
        if not self._path.is_file():
            return
        with self._opened() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM calls ORDER BY recorded_at, rowid").fetchall()
        yield from map(_call, rows)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _find(self, key: tuple[str, str, str, bool]) -> Recorded | None:
        if not self._path.is_file():
            return None
        with self._opened() as connection:
            row = connection.execute(_FIND, key).fetchone()
        return None if row is None else _call(row)

    def _add(self, call: Recorded) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        meta = json.dumps(self._secrets.hidden_within(call.result.meta), ensure_ascii=False)
        row = (
            call.tool,
            self._cleaned(call.argument),
            _storable(self._secrets.hidden(call.result.text)),
            call.result.ok,
            _storable(meta),
            call.version,
            call.recorded_at,
            self._cleaned(call.context),
        )
        with self._opened() as connection:
            connection.execute(
                f"INSERT OR REPLACE INTO calls ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row
            )

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _connect(self._path)
                with self._connection:
                    yield self._connection
            except sqlite3.DatabaseError as error:
                raise ConfigError(
                    f"{self._path}: cannot be used as a cassette: {error}; set `cassette` in the tools YAML to a "
                    "recorded file or a new path"
                ) from error

    def _cleaned(self, text: str) -> str:
        # A secret may only appear after blanks and line ends are normalised.
        return _storable(self._secrets.hidden(normalised(self._secrets.hidden(text))))


def _storable(text: str) -> str:
    """Return ``text`` without lone surrogates, which UTF-8 cannot encode."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def _connect(path: Path) -> sqlite3.Connection:
    if path.is_file() and not os.access(path.parent, os.W_OK):
        return _connect_where_nothing_can_be_written(path)
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
    try:
        if _version(connection) != _SCHEMA_VERSION:
            write_ahead(connection, timeout_s=_BUSY_TIMEOUT_S)
            _create(connection, path)
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_where_nothing_can_be_written(path: Path) -> sqlite3.Connection:
    """Open a file as immutable. Otherwise SQLite creates files next to it even to read its write-ahead log."""
    log = path.with_name(f"{path.name}-wal")
    if log.is_file() and log.stat().st_size:
        raise ConfigError(
            f"{path}: its recorder was stopped and left {log.name}; make the folder writable and run "
            "`afm cassette FILE` once"
        )
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True, check_same_thread=False)
    try:
        if _version(connection) != _SCHEMA_VERSION:
            raise _other_version(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _create(connection: sqlite3.Connection, path: Path) -> None:
    """Make the table of a new file."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")  # another process may create it at the same time
        if _version(connection) == _SCHEMA_VERSION:
            return
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
            raise _other_version(connection, path)
        connection.execute(_CREATE)
        connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")


def _other_version(connection: sqlite3.Connection, path: Path) -> ConfigError:
    version = _version(connection)
    return ConfigError(
        f"{path}: a cassette of version {version}, expected {_SCHEMA_VERSION}; record it again"
    )


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _call(row: tuple[Any, ...]) -> Recorded:
    tool, argument, text, ok, meta, version, recorded_at, context = row
    result = ToolResult(text, bool(ok), json.loads(meta))
    return Recorded(tool, argument, result, version, recorded_at, context)


class Mode(StrEnum):
    """The use of a cassette."""

    RECORD = "record"
    """Makes and records every call, and replaces earlier recordings."""
    REPLAY = "replay"
    """Answers recorded calls from the cassette."""


class OnMiss(StrEnum):
    """The treatment of a call that is missing from the cassette."""

    ERROR = "error"
    """Ends the episode with an error."""
    LIVE = "live"
    """Makes and records the call."""
    EMPTY = "empty"
    """Tells the agent that nothing was found."""


class Goal(StrEnum):
    """The recorded calls that may answer a tool whose result depends on the goal of the episode."""

    SAME = "same"
    """Only calls with the same goal."""
    ANY = "any"
    """Also the latest call with another goal, for agents that word their thoughts differently each time."""


class CassetteSettings(Settings):
    """The ``cassette`` section of a tools YAML. A path is short for ``{file: PATH}``.

    ``on_miss`` and ``goal`` apply to replay.
    """

    file: Path
    mode: Mode = Mode.REPLAY
    on_miss: OnMiss = OnMiss.ERROR
    goal: Goal = Goal.SAME


def tool_version(class_name: str, config: Mapping[str, Any]) -> str:
    """Return the digest of a tool's class and settings. A call recorded with another digest is stale."""
    text = json.dumps([class_name, config], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class CassetteTool:
    """A tool behind a cassette.

    Args:
        tool: The real tool. It is called for recordings and for misses with ``live``.
        version: See :func:`tool_version`.
    """

    def __init__(self, tool: Tool, cassette: Cassette, settings: CassetteSettings, version: str) -> None:
        self._tool = tool
        self._cassette = cassette
        self._settings = settings
        self._version = version

    @property
    def name(self) -> str:
        """The name of the tool."""
        return self._tool.name

    async def call(self, argument: str) -> ToolResult:
        """See :class:`afm.tools.base.Tool`. ``meta`` holds ``cassette`` (hit, miss or recorded) and ``stale``.

        A hit is stale if it was recorded with other settings of the tool, with another goal, or with an unknown one.

        Raises:
            ReplayError: The call is missing from the cassette, and ``on_miss`` is ``error``.
        """
        context = self._tool.context() if isinstance(self._tool, ContextTool) else ""
        if self._settings.mode is Mode.REPLAY:
            replayed = await self._replay(argument, context)
            if replayed is not None:
                return replayed
            if self._settings.on_miss is OnMiss.ERROR:
                toward = " with this goal" if context else ""
                or_any = ", or cassette.goal to any" if context else ""
                raise ReplayError(
                    f"{self._settings.file}: no recorded call of {self.name} with argument "
                    f"{normalised(argument)[:200]!r}{toward}; record it, or set cassette.on_miss to live or empty{or_any}"
                )
            if self._settings.on_miss is OnMiss.EMPTY:
                return ToolResult("Nothing was found.", meta={"cassette": "miss"})
        result = await self._tool.call(argument)
        if result.ok:  # a recorded failure of the infrastructure would be replayed every time
            call = Recorded(self.name, argument, result, self._version, time.time(), context)
            await self._cassette.add(call)
        return ToolResult(result.text, result.ok, {**result.meta, "cassette": "recorded"})

    async def _replay(self, argument: str, context: str) -> ToolResult | None:
        any_context = self._settings.goal is Goal.ANY
        call = await self._cassette.find(self.name, argument, context, any_context=any_context)
        if call is None:
            return None
        stale = call.version != self._version or not self._cassette.same(call.context, context)
        meta = {**call.result.meta, "cassette": "hit", "stale": stale}
        return ToolResult(call.result.text, call.result.ok, meta)

    async def close(self) -> None:
        """Close the tool and the cassette."""
        await self._tool.close()
        await asyncio.to_thread(self._cassette.close)


@dataclass(frozen=True, slots=True)
class Staleness:
    """The age of the calls of one tool.

    Attributes:
        oldest: Time of the oldest call in seconds since the epoch, like ``newest``.
        outdated: Number of calls that are older than allowed.
        versions: Number of calls by version of the tool. Several versions mean that its settings changed.
    """

    calls: int
    oldest: float
    newest: float
    outdated: int
    versions: Mapping[str, int]


def staleness(cassette: Cassette, max_age_s: float, now: float | None = None) -> dict[str, Staleness]:
    """Return the age of a cassette's calls by tool."""
    limit = (time.time() if now is None else now) - max_age_s
    by_tool: dict[str, list[Recorded]] = {}
    for call in cassette.calls():
        by_tool.setdefault(call.tool, []).append(call)
    return {tool: _staleness(calls, limit) for tool, calls in sorted(by_tool.items())}


def _staleness(calls: list[Recorded], limit: float) -> Staleness:
    times = [call.recorded_at for call in calls]
    versions: dict[str, int] = {}
    for call in calls:
        versions[call.version] = versions.get(call.version, 0) + 1
    return Staleness(len(calls), min(times), max(times), sum(time < limit for time in times), versions)
