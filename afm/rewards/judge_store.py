"""What judges have said, in SQLite files that several processes may share."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from afm.rewards.judge_prompt import Ruling
from afm.sqlite import SharedFile

_VERSION = 1
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, judgement TEXT, rationale TEXT, at REAL)"
)


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
        self._file = SharedFile(path, "cache of verdicts", _SCHEMA)

    async def find(self, key: str) -> Ruling | None:
        """The verdict, if it was given before."""
        with suppress(sqlite3.Error):
            return await asyncio.to_thread(self._find, key)
        return None

    async def add(self, key: str, ruling: Ruling) -> None:
        """Keep a verdict; the first one of several processes stays."""
        with suppress(sqlite3.Error):
            await asyncio.to_thread(self._add, key, ruling)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _find(self, key: str) -> Ruling | None:
        with self._file.transaction() as connection:
            query = "SELECT judgement, rationale FROM verdicts WHERE key = ?"
            row = connection.execute(query, (key,)).fetchone()
        return Ruling(*row) if row is not None and row[0] in ("correct", "incorrect") else None

    def _add(self, key: str, ruling: Ruling) -> None:
        row = (key, ruling.judgement, ruling.rationale.encode("utf-8", "replace").decode(), time.time())
        with self._file.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?)", row)
