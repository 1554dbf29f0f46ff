"""A cache of texts that outlives its server: an SQLite file, or Redis shared by several machines.

A cache never fails a request: when its store is out of reach, everything is a miss, and ``errors`` counts it.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from afm.errors import ConfigError, MissingExtraError
from afm.sqlite import write_ahead

ResultT = TypeVar("ResultT")

_TRIM_EVERY = 64
_BUSY_S = 5.0
_REDIS_TIMEOUT_S = 1.0
_REDIS_REST_S = 1.0
"""How long Redis is left alone after a failure, so that a dead one does not slow every request down."""


class Cache(Protocol):
    """Texts by key, and counters."""

    errors: int
    """Operations that the store did not answer."""

    async def get(self, key: str) -> str | None:
        """The text, unless it is absent or too old."""
        ...

    async def put(self, key: str, text: str) -> None:
        """Keep a text."""
        ...

    async def add(self, key: str, amount: int) -> int:
        """Add to a counter that never expires; its new value."""
        ...

    async def close(self) -> None:
        """Let go of the store."""
        ...


def open_cache(where: str, name: str, *, max_entries: int, ttl_s: float) -> Cache:
    """The cache at a Redis address or in an SQLite file.

    Args:
        where: ``redis://host:6379/0``, ``rediss://...``, or a path.
        name: Sets this cache apart from others in the same store.
        max_entries: The oldest beyond them are dropped.
        ttl_s: Seconds until a text is too old.

    Raises:
        ConfigError: The file cannot be opened.
    """
    if where.startswith(("redis://", "rediss://", "unix://")):
        return RedisCache(where, name, max_entries=max_entries, ttl_s=ttl_s)
    return SqliteCache(Path(where).expanduser(), name, max_entries=max_entries, ttl_s=ttl_s)


class SqliteCache:
    """A file that several processes may use at once and that survives ``kill -9``; one that is damaged is set aside."""

    def __init__(self, path: Path, name: str, *, max_entries: int, ttl_s: float) -> None:
        self.errors = 0
        self._name = name
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._puts = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache")
        try:
            self._store = self._thread.submit(_opened, path).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(f"cache {path}: cannot be opened: {error}; choose another place") from None

    async def get(self, key: str) -> str | None:
        """The text, unless it is absent or too old."""
        packed = await self._run(lambda: self._read(key))
        return None if packed is None else zlib.decompress(packed).decode()

    async def put(self, key: str, text: str) -> None:
        """Keep a text."""
        await self._run(lambda: self._write(key, zlib.compress(text.encode("utf-8", "replace"), 1)))

    async def add(self, key: str, amount: int) -> int:
        """Add to a counter that never expires; its new value, or ``amount`` when the file cannot be written."""
        value = await self._run(lambda: self._count(key, amount))
        return amount if value is None else value

    async def close(self) -> None:
        """Close the file."""
        await self._run(self._store.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[], ResultT]) -> ResultT | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, zlib.error):
            self.errors += 1
            return None

    def _read(self, key: str) -> bytes | None:
        row = self._store.execute(
            "SELECT value FROM texts WHERE cache = ? AND key = ? AND stored_at > ?",
            (self._name, key, time.time() - self._ttl_s),
        ).fetchone()
        return None if row is None else bytes(row[0])

    def _write(self, key: str, packed: bytes) -> None:
        self._store.execute(
            "INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?)", (self._name, key, time.time(), packed)
        )
        self._puts += 1
        if self._puts % _TRIM_EVERY == 1:
            self._trim()

    def _trim(self) -> None:
        self._store.execute(
            "DELETE FROM texts WHERE cache = ? AND stored_at <= ?", (self._name, time.time() - self._ttl_s)
        )
        self._store.execute(
            "DELETE FROM texts WHERE rowid IN "
            "(SELECT rowid FROM texts WHERE cache = ? ORDER BY stored_at DESC LIMIT -1 OFFSET ?)",
            (self._name, self._max_entries),
        )

    def _count(self, key: str, amount: int) -> int:
        row = self._store.execute(
            "INSERT INTO counters VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value "
            "RETURNING value",
            (self._name, key, amount),
        ).fetchone()
        return int(row[0])


def _opened(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return _with_tables(path)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        path.replace(path.with_name(path.name + ".damaged"))
        return _with_tables(path)


def _with_tables(path: Path) -> sqlite3.Connection:
    store = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        write_ahead(store, timeout_s=_BUSY_S)
        store.execute("PRAGMA synchronous=NORMAL")
        store.execute(
            "CREATE TABLE IF NOT EXISTS texts "
            "(cache TEXT, key TEXT, stored_at REAL, value BLOB, PRIMARY KEY (cache, key))"
        )
        store.execute("CREATE INDEX IF NOT EXISTS age ON texts (cache, stored_at)")
        store.execute(
            "CREATE TABLE IF NOT EXISTS counters (cache TEXT, key TEXT, value INTEGER, PRIMARY KEY (cache, key))"
        )
    except BaseException:
        store.close()
        raise
    return store


class RedisCache:
    """Redis; while it is away every look-up is a miss within a second and counters go on in this process."""

    def __init__(self, url: str, name: str, *, max_entries: int, ttl_s: float) -> None:
        try:
            from redis import asyncio as redis
        except ImportError:
            raise MissingExtraError("redis", "servers") from None
        self.errors = 0
        self._prefix = f"afm:{name}:"
        self._max_entries = max_entries
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._away_until = float("-inf")
        self._own_counts: Counter[str] = Counter()
        try:
            self._redis: Any = redis.Redis.from_url(
                url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S
            )
        except ValueError:
            raise ConfigError("cache: got no valid Redis address, expected redis://HOST:6379/0") from None

    async def get(self, key: str) -> str | None:
        """The text, unless it is absent, too old, or Redis is away."""
        packed = await self._run(lambda: self._redis.get(self._prefix + key))
        try:
            return None if packed is None else zlib.decompress(packed).decode()
        except (zlib.error, UnicodeDecodeError):
            self.errors += 1
            return None

    async def put(self, key: str, text: str) -> None:
        """Keep a text, if Redis is there."""
        await self._run(lambda: self._write(key, zlib.compress(text.encode("utf-8", "replace"), 1)))

    async def add(self, key: str, amount: int) -> int:
        """Add to a counter; while Redis is away, this process's own count goes on from what it last saw."""
        value = await self._run(lambda: self._redis.incrby(f"{self._prefix}count:{key}", amount))
        self._own_counts[key] = self._own_counts[key] + amount if value is None else int(value)
        return self._own_counts[key]

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _write(self, key: str, packed: bytes) -> None:
        order = f"{self._prefix}order"
        async with self._redis.pipeline(transaction=False) as steps:
            steps.set(self._prefix + key, packed, px=self._ttl_ms)
            steps.zadd(order, {key: time.time()})
            steps.zcard(order)
            *_, entries = await steps.execute()
        if entries > self._max_entries:
            dropped = await self._redis.zpopmin(order, entries - self._max_entries)
            await self._redis.delete(*(self._prefix + member.decode() for member, _ in dropped))

    async def _run(self, work: Callable[[], Any]) -> Any:
        from redis.exceptions import RedisError

        if time.monotonic() < self._away_until:
            self.errors += 1
            return None
        try:
            async with asyncio.timeout(2 * _REDIS_TIMEOUT_S):
                return await work()
        except (RedisError, OSError, TimeoutError):
            self.errors += 1
            self._away_until = time.monotonic() + _REDIS_REST_S
            return None
