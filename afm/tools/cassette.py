"""Tool calls recorded once and replayed for free: the same answers, in evaluation and in training.

A cassette is one SQLite file that several processes may write at once and that survives ``kill -9``. In a tools YAML::

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
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from afm.errors import ConfigError, ReplayError
from afm.tools.base import Tool, ToolResult

_SCHEMA_VERSION = 1
_BUSY_TIMEOUT_S = 30.0
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 8
_HIDDEN = "[secret]"


class Mode(StrEnum):
    """What a cassette is used for."""

    RECORD = "record"
    """Every call is made and recorded; what was recorded before is replaced."""
    REPLAY = "replay"
    """Recorded calls are answered from the cassette."""


class OnMiss(StrEnum):
    """What becomes of a call that is not on the cassette."""

    ERROR = "error"
    """The episode ends with an error."""
    LIVE = "live"
    """The call is made, and recorded."""
    EMPTY = "empty"
    """The agent is told that nothing was found."""


class CassetteSettings(BaseModel):
    """The ``cassette`` part of a tools YAML; a path alone stands for ``{file: PATH}``.

    Attributes:
        file: The cassette.
        mode: Record or replay.
        on_miss: For replay.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: Path
    mode: Mode = Mode.REPLAY
    on_miss: OnMiss = OnMiss.ERROR


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call on a cassette.

    Attributes:
        version: Digest of the tool's class and settings when it was recorded.
        recorded_at: Seconds since the epoch.
    """

    tool: str
    argument: str
    result: ToolResult
    version: str
    recorded_at: float


def normalised(argument: str) -> str:
    """An argument without differences that no tool sees: Unicode form, line ends, blanks at line ends."""
    lines = unicodedata.normalize("NFC", argument).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip()


def tool_version(class_name: str, config: Mapping[str, Any]) -> str:
    """Digest of what a tool is; a call recorded under another one is stale."""
    text = json.dumps([class_name, config], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Cassette:
    """The recorded calls in one file.

    Args:
        path: The file; made when the first call is recorded.
        readonly: Refuse a file that is not there.

    Raises:
        ConfigError: The file is missing though it must be read, or is no cassette of this version.
    """

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        if readonly and not path.is_file():
            raise ConfigError(
                f"{path}: no such cassette; record one with `cassette: {{file: ..., mode: record}}`"
            )
        self._path = path
        self._secrets = _secrets()
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        if path.is_file():
            with self._opened():
                pass

    async def find(self, tool: str, argument: str) -> Recorded | None:
        """The recorded call, if there is one."""
        return await asyncio.to_thread(self._find, tool, self._without_secrets(normalised(argument)))

    async def add(self, call: Recorded) -> None:
        """Record a call, in place of an equal one; values of secret environment variables are never stored."""
        await asyncio.to_thread(self._add, call)

    def calls(self) -> Iterator[Recorded]:
        """Every call, the oldest first."""
        if not self._path.is_file():
            return
        with self._opened() as connection:
            rows = connection.execute(
                "SELECT tool, argument, text, ok, meta, version, recorded_at FROM calls ORDER BY recorded_at, rowid"
            ).fetchall()
        yield from map(_call, rows)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _find(self, tool: str, argument: str) -> Recorded | None:
        if not self._path.is_file():
            return None
        with self._opened() as connection:
            row = connection.execute(
                "SELECT tool, argument, text, ok, meta, version, recorded_at FROM calls WHERE tool = ? AND argument = ?",
                (tool, argument),
            ).fetchone()
        return None if row is None else _call(row)

    def _add(self, call: Recorded) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        meta = json.dumps(dict(call.result.meta), ensure_ascii=False, default=str)
        row = (
            call.tool,
            self._without_secrets(normalised(call.argument)),
            self._without_secrets(call.result.text),
            call.result.ok,
            self._without_secrets(meta),
            call.version,
            call.recorded_at,
        )
        with self._opened() as connection:
            connection.execute("INSERT OR REPLACE INTO calls VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _connect(self._path)
                with self._connection:
                    yield self._connection
            except sqlite3.DatabaseError as error:
                raise ConfigError(f"{self._path}: cannot be used as a cassette: {error}") from error

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        return text


class CassetteTool:
    """A tool behind a cassette.

    Args:
        tool: The real one; called when recording, and on a miss that is answered live.
        version: See :func:`tool_version`.
    """

    def __init__(self, tool: Tool, cassette: Cassette, settings: CassetteSettings, version: str) -> None:
        self._tool = tool
        self._cassette = cassette
        self._settings = settings
        self._version = version

    @property
    def name(self) -> str:
        """That of the tool."""
        return self._tool.name

    async def call(self, argument: str) -> ToolResult:
        """See :class:`afm.tools.base.Tool`; ``meta`` says ``cassette``: hit, miss or recorded, and ``stale``.

        Raises:
            ReplayError: The call is not on the cassette, and ``on_miss`` is ``error``.
        """
        if self._settings.mode is Mode.REPLAY:
            found = await self._cassette.find(self.name, argument)
            if found is not None:
                facts = {"cassette": "hit", "stale": found.version != self._version}
                return ToolResult(found.result.text, found.result.ok, {**found.result.meta, **facts})
            if self._settings.on_miss is OnMiss.ERROR:
                raise ReplayError(
                    f"{self._settings.file}: no recorded call of {self.name} with argument "
                    f"{normalised(argument)[:200]!r}; record it, or set cassette.on_miss to live or empty"
                )
            if self._settings.on_miss is OnMiss.EMPTY:
                return ToolResult("Nothing was found.", meta={"cassette": "miss"})
        result = await self._tool.call(argument)
        if result.ok:  # a failure of the infrastructure would be replayed for ever
            await self._cassette.add(Recorded(self.name, argument, result, self._version, time.time()))
        return ToolResult(result.text, result.ok, {**result.meta, "cassette": "recorded"})

    async def close(self) -> None:
        """Close the tool and the cassette."""
        await self._tool.close()
        await asyncio.to_thread(self._cassette.close)


@dataclass(frozen=True, slots=True)
class Staleness:
    """How old the calls of one tool are.

    Attributes:
        calls: Number recorded.
        oldest: Seconds since the epoch.
        newest: Likewise.
        outdated: Calls recorded longer ago than allowed.
        versions: Calls by version of the tool; more than one means that its settings changed in between.
    """

    calls: int
    oldest: float
    newest: float
    outdated: int
    versions: Mapping[str, int]


def staleness(cassette: Cassette, max_age_s: float, now: float | None = None) -> dict[str, Staleness]:
    """How old a cassette's calls are, by tool."""
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


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        with closing(connection.execute("SELECT count(*) FROM sqlite_master")) as cursor:
            (tables,) = cursor.fetchone()
        if version != _SCHEMA_VERSION and tables:
            raise ConfigError(
                f"{path}: a cassette of version {version}, expected {_SCHEMA_VERSION}; record it anew"
            )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if version != _SCHEMA_VERSION:
            with connection:
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS calls (tool TEXT, argument TEXT, text TEXT, ok INTEGER, meta TEXT, "
                    "version TEXT, recorded_at REAL, PRIMARY KEY (tool, argument))"
                )
                connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
    except BaseException:
        connection.close()
        raise
    return connection


def _call(row: tuple[Any, ...]) -> Recorded:
    tool, argument, text, ok, meta, version, recorded_at = row
    return Recorded(tool, argument, ToolResult(text, bool(ok), json.loads(meta)), version, recorded_at)


def _secrets() -> tuple[str, ...]:
    """Values of environment variables that look like secrets, the longest first."""
    found = {
        value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET
    }
    return tuple(sorted(found, key=len, reverse=True))
