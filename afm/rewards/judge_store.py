"""What judges have said and what they have cost, in SQLite files that several processes may share."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from afm.errors import ConfigError, RewardError
from afm.rewards.judge_prompt import Ruling
from afm.sqlite import write_ahead

_BUSY_S = 30.0
_VERSION = 1


class BudgetError(RewardError):
    """The budget of the judge is spent."""


class _File:
    """One SQLite file, opened when it is first needed, anew in each process; in memory without a path."""

    def __init__(self, path: Path | None, what: str, schema: str) -> None:
        self._path, self._what, self._schema = path, what, schema
        self._lock = threading.Lock()
        self._process = 0
        self._connection: sqlite3.Connection | None = None

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """A transaction.

        Raises:
            ConfigError: The file cannot be used at all.
            RewardError: It cannot be used at the moment: the disk is full, another process does not let go of it.
        """
        with self._lock:
            if self._connection is None or self._process != os.getpid():
                try:
                    self._connection, self._process = self._connected(), os.getpid()
                except (sqlite3.Error, OSError) as error:
                    raise ConfigError(f"{self._path}: cannot be used as a {self._what}: {error}") from error
            try:
                with self._connection:
                    yield self._connection
            except sqlite3.Error as error:
                raise RewardError(f"{self._path}: the {self._what} failed: {error}") from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def _connected(self) -> sqlite3.Connection:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self._path or ":memory:", timeout=_BUSY_S, check_same_thread=False)
        try:
            write_ahead(connection, timeout_s=_BUSY_S)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(self._schema)
            connection.commit()
        except BaseException:
            connection.close()
            raise
        return connection


def cache_key(url: str, body: Mapping[str, Any]) -> str:
    """Digest of everything that a verdict depends on: the server and the whole request, which names the model."""
    text = json.dumps([_VERSION, url, body], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class VerdictCache:
    """Verdicts by :func:`cache_key`; failures are never kept.

    Its methods raise ``ConfigError`` when the file cannot be used at all. When it cannot be used at the moment,
    nothing is found and nothing is kept.
    """

    def __init__(self, path: Path) -> None:
        schema = "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, judgement TEXT, rationale TEXT, at REAL)"
        self._file = _File(path, "cache of verdicts", schema)

    async def find(self, key: str) -> Ruling | None:
        """The verdict, if it was given before."""
        with suppress(RewardError):
            return await asyncio.to_thread(self._find, key)
        return None

    async def add(self, key: str, ruling: Ruling) -> None:
        """Keep a verdict; the first one of several processes stays."""
        with suppress(RewardError):
            await asyncio.to_thread(self._add, key, ruling)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _find(self, key: str) -> Ruling | None:
        with self._file.opened() as connection:
            query = "SELECT judgement, rationale FROM verdicts WHERE key = ?"
            with closing(connection.execute(query, (key,))) as rows:
                row = rows.fetchone()
        return Ruling(*row) if row is not None and row[0] in ("correct", "incorrect") else None

    def _add(self, key: str, ruling: Ruling) -> None:
        row = (key, ruling.judgement, ruling.rationale.encode("utf-8", "replace").decode(), time.time())
        with self._file.opened() as connection:
            connection.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?)", row)


class Ledger:
    """Counts requests and tokens, and refuses what is beyond the budget.

    Args:
        calls: Most requests, repeated ones included; ``None`` for no limit.
        tokens: Most tokens, prompt and reply together; ``None`` for no limit.
        path: Shared by processes and kept over restarts; without it each process counts alone.
    """

    def __init__(self, calls: int | None, tokens: int | None, path: Path | None) -> None:
        self._calls = calls
        self._tokens = tokens
        schema = "CREATE TABLE IF NOT EXISTS spent (one INTEGER PRIMARY KEY CHECK (one = 1), calls INTEGER, tokens INTEGER)"
        self._file = _File(path, "ledger of the judge's budget", schema)

    async def reserve(self, tokens: int) -> None:
        """Take one request of about so many tokens out of the budget.

        Raises:
            BudgetError: There is not enough left.
        """
        await asyncio.to_thread(self._reserve, tokens)

    async def settle(self, reserved: int, used: int) -> None:
        """Replace what was reserved by what was used."""
        await asyncio.to_thread(self._settle, used - reserved)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _reserve(self, tokens: int) -> None:
        with self._file.opened() as connection:
            connection.execute("INSERT OR IGNORE INTO spent VALUES (1, 0, 0)")
            taken = connection.execute(
                "UPDATE spent SET calls = calls + 1, tokens = tokens + :more "
                "WHERE (:calls IS NULL OR calls < :calls) AND (:tokens IS NULL OR tokens + :more <= :tokens)",
                {"more": tokens, "calls": self._calls, "tokens": self._tokens},
            ).rowcount
            spent = connection.execute("SELECT calls, tokens FROM spent").fetchone()
        if not taken:
            raise BudgetError(f"the judge's budget is spent: {spent[0]} calls, {spent[1]} tokens")

    def _settle(self, difference: int) -> None:
        with self._file.opened() as connection:
            connection.execute("UPDATE spent SET tokens = max(0, tokens + ?)", (difference,))
