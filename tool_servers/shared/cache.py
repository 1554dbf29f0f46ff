"""A cache of texts that outlives its server: an SQLite file, or a Redis server that several machines share.

A cache never fails a request. While its store cannot be reached, every look-up is a miss, and ``errors`` counts it.
"""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
import time
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from afm.errors import ConfigError, MissingExtraError
from afm.settings import Environment
from afm.sqlite import write_ahead

ResultT = TypeVar("ResultT")

_TIMEOUT_S = 1.0
_TRIM_EVERY = 64
_OPENING_S = 5.0
_BUSY_S = 1.0
_REST_S = 1.0
"""How long a store is not asked after a failure, so that a dead store does not slow down every request."""
_READING, _WRITING = "reading", "writing"
_RENEWAL_S = 60.0
"""Shortest time between two new files, for disks that damage one file after another."""


class WorkUnderWay(Generic[ResultT]):
    """Does work once that several requests want at the same time.

    A cancelled request does not stop the work, so the other requests still get the result.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[ResultT]] = {}

    async def result(
        self, key: str, work: Callable[[], Coroutine[Any, Any, ResultT]]
    ) -> tuple[ResultT, bool]:
        """Return the result of ``work``, and whether the work was already running."""
        task = self._tasks.get(key)
        known = task is not None
        if task is None:
            task = asyncio.create_task(work())
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task), known

    async def close(self) -> None:
        """Cancel all running work."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, key: str, task: asyncio.Task[ResultT]) -> None:
        self._tasks.pop(key, None)
        if not task.cancelled():
            task.exception()  # marks it as retrieved; all requests may be gone


class OwnCounts:
    """Counters of this process. What the store misses while it is unreachable is added when it is back."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._stored: Counter[str] = Counter()

    def due(self, key: str, amount: int) -> int:
        """Return how much to add to the store: ``amount`` plus everything that it has missed."""
        missed = self._seen[key] - self._stored[key]
        self._stored[key] = self._seen[key]
        return missed + amount

    def value(self, key: str, amount: int, due: int, stored: int | None) -> int:
        """Return the counter. ``stored`` is the store's answer to adding ``due``; ``None``: it did not answer."""
        if stored is None:
            self._stored[key] -= due - amount
            self._seen[key] += amount
        else:
            self._seen[key] = self._stored[key] = stored
        return self._seen[key]

    def lost(self) -> None:
        """Forget what the store held, because it is empty now."""
        self._stored.clear()


class Cache(ABC):
    """Texts by key, and counters that never expire.

    Attributes:
        errors: Operations that the store did not answer, and texts that it returned damaged.
    """

    def __init__(self, max_entries: int, ttl_s: float) -> None:
        self.errors = 0
        self._max_entries, self._ttl_s = max_entries, ttl_s
        self._counts = OwnCounts()
        self._rests_until = {_READING: 0.0, _WRITING: 0.0}  # a file locked for writing is still readable

    async def get(self, key: str) -> str | None:
        """Return the text; ``None`` if it is absent, too old or unreadable, or the store is unreachable."""
        stored = await self._ask(lambda: self._read(key), _READING)
        try:
            return None if stored is None else zlib.decompress(stored).decode()
        except (zlib.error, ValueError, TypeError):
            self.errors += 1
            return None

    async def put(self, key: str, text: str) -> None:
        """Store a text, if the store accepts it."""
        value = zlib.compress(text.encode("utf-8", "replace"), 1)
        await self._ask(lambda: self._write(key, value), _WRITING)

    async def cached(
        self,
        key: str,
        kind: TypeAdapter[ResultT],
        work: Callable[[], Awaitable[ResultT]],
        *,
        worth: Callable[[ResultT], bool] = lambda _: True,
    ) -> tuple[ResultT, bool]:
        """Return the stored result for ``key`` or else that of ``work``, and whether it was stored.

        Args:
            kind: Type of the results. A result of another type, stored by another version of the server, is recomputed.
            worth: Whether to store a result.
        """
        kept = await self.get(key)
        if kept is not None:
            with suppress(ValidationError):
                return kind.validate_json(kept), True
        result = await work()
        if worth(result):
            await self.put(key, kind.dump_json(result).decode())
        return result, False

    @abstractmethod
    async def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it; while the store is unreachable, continue the count of this process."""

    @abstractmethod
    async def close(self) -> None:
        """Close the store."""

    @abstractmethod
    async def _ask(self, work: Callable[[], Any], task: str) -> Any:
        """Return the result of ``work``; if the store fails or rests, count an error and return ``None``."""

    @abstractmethod
    def _read(self, key: str) -> Any: ...

    @abstractmethod
    def _write(self, key: str, value: bytes) -> Any: ...


class RedisCache(Cache):
    """A cache in Redis; while Redis is unreachable, every look-up is a miss within a second."""

    def __init__(self, url: str, name: str, *, max_entries: int, ttl_s: float) -> None:
        try:
            from redis import asyncio as redis
        except ImportError:
            raise MissingExtraError("redis", "servers") from None
        super().__init__(max_entries, ttl_s)
        self._prefix = f"afm:{name}:"
        try:
            self._redis: Any = redis.Redis.from_url(
                url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
            )
            # Opens no connection, but parses the options in the address.
            self._redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        except (ValueError, TypeError):
            raise ConfigError("cache: got no valid Redis address, expected redis://HOST:6379/0") from None

    async def add(self, key: str, amount: int) -> int:
        """See :class:`Cache`."""
        due = self._counts.due(key, amount)
        stored = await self._ask(lambda: self._redis.incrby(f"{self._prefix}count:{key}", due), _WRITING)
        return self._counts.value(key, amount, due, stored)

    async def close(self) -> None:
        """See :class:`Cache`."""
        await self._redis.aclose()

    def _read(self, key: str) -> Any:
        return self._redis.get(self._prefix + key)

    async def _write(self, key: str, value: bytes) -> None:
        order = f"{self._prefix}order"
        async with self._redis.pipeline(transaction=False) as steps:
            steps.set(self._prefix + key, value, px=max(1, round(self._ttl_s * 1000)))
            steps.zadd(order, {key: time.time()})
            steps.zcard(order)
            *_, entries = await steps.execute()
        if entries > self._max_entries:
            dropped = await self._redis.zpopmin(order, entries - self._max_entries)
            await self._redis.delete(*(self._prefix + member.decode() for member, _ in dropped))

    async def _ask(self, work: Callable[[], Any], task: str) -> Any:
        from redis.exceptions import RedisError

        try:
            if time.monotonic() >= max(self._rests_until.values()):
                async with asyncio.timeout(2 * _TIMEOUT_S):
                    return await work()
        except (RedisError, OSError, TimeoutError):
            self._rests_until[task] = time.monotonic() + _REST_S
        self.errors += 1
        return None


class SqliteCache(Cache):
    """A cache in a file that several processes share and that survives ``kill -9``; a damaged file is renamed."""

    def __init__(self, path: Path, name: str, *, max_entries: int, ttl_s: float) -> None:
        super().__init__(max_entries, ttl_s)
        self._path, self._name = path, name
        self._puts = 0
        self._damaged, self._kept_until = False, float("-inf")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache")
        try:
            self._store, self._place = self._thread.submit(_opened, path).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(f"cache {path}: cannot be opened: {error}; choose another path") from None

    async def add(self, key: str, amount: int) -> int:
        """See :class:`Cache`."""

        def counted() -> int:
            due = self._counts.due(key, amount)
            return self._counts.value(key, amount, due, self._tried(lambda: self._count(key, due), _WRITING))

        return await self._in_thread(counted)

    async def close(self) -> None:
        """See :class:`Cache`."""
        await self._in_thread(lambda: self._store.close())
        self._thread.shutdown()

    async def _ask(self, work: Callable[[], Any], task: str) -> Any:
        return await self._in_thread(lambda: self._tried(work, task))

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._done, work)

    def _done(self, work: Callable[[], ResultT]) -> ResultT:
        result = work()
        if self._damaged:
            self._renew()
        return result

    def _tried(self, work: Callable[[], ResultT], task: str) -> ResultT | None:
        """Run ``work`` unless the store rests; the check is in the cache's thread, after any failure queued before."""
        try:
            if time.monotonic() >= self._rests_until[task]:
                return work()
        except sqlite3.Error as error:
            self._damaged = _is_damage(error)
            self._rests_until[task] = time.monotonic() + _REST_S
        self.errors += 1
        return None

    def _renew(self) -> None:
        """Switch to a new file."""
        self._damaged = False
        if time.monotonic() < self._kept_until:
            return
        self._kept_until = time.monotonic() + _RENEWAL_S
        old = self._store
        with suppress(OSError, sqlite3.Error):
            self._store, self._place = _opened(self._path, self._place)
            self._counts.lost()
            self._rests_until = {_READING: 0.0, _WRITING: 0.0}
            old.close()

    def _read(self, key: str) -> Any:
        row = self._store.execute(
            "SELECT coalesce(value, '') FROM texts WHERE cache = ? AND key = ? AND stored_at > ?",
            (self._name, key, time.time() - self._ttl_s),
        ).fetchone()
        return None if row is None else row[0]

    def _write(self, key: str, value: bytes) -> None:
        self._store.execute(
            "INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?)", (self._name, key, time.time(), value)
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


def open_cache(where: str, name: str, *, max_entries: int, ttl_s: float) -> Cache:
    """Open the cache at a Redis address or in an SQLite file.

    Args:
        where: ``redis://host:6379/0``, ``rediss://...``, or a path.
        name: Separates this cache from others in the same store.
        max_entries: Most texts; beyond that, the oldest are dropped.
        ttl_s: Seconds until a text expires.

    Raises:
        ConfigError: The file cannot be opened, or the address is invalid.
    """
    if where.startswith(("redis://", "rediss://", "unix://")):
        return RedisCache(where, name, max_entries=max_entries, ttl_s=ttl_s)
    return SqliteCache(Path(where).expanduser(), name, max_entries=max_entries, ttl_s=ttl_s)


def open_web_cache(environment: Environment, name: str, *, max_entries: int, ttl_s: float) -> Cache:
    """Open the cache at ``WEB_CACHE``, or else in a file in the user's cache folder."""
    secret = environment.web_cache
    where = secret.get_secret_value() if secret else str(Path("~/.cache/afm/web.sqlite").expanduser())
    return open_cache(where, name, max_entries=max_entries, ttl_s=ttl_s)


def _opened(path: Path, damaged: tuple[int, int] | None = None) -> tuple[sqlite3.Connection, tuple[int, int]]:
    """Open the store, replacing a damaged one; return it with the device and inode of its file.

    Args:
        damaged: The file known to be damaged; another process may already have renamed it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if damaged is not None and path.exists() and _place_of(path) == damaged:
            _set_aside(path)
        try:
            store = _with_tables(path)
        except sqlite3.Error as error:
            if not _is_damage(error):
                raise
            _set_aside(path)
            store = _with_tables(path)
        return store, _place_of(path)


def _with_tables(path: Path) -> sqlite3.Connection:
    store = sqlite3.connect(path, timeout=_OPENING_S, isolation_level=None, check_same_thread=False)
    try:
        write_ahead(store, timeout_s=_OPENING_S)
        store.execute("PRAGMA synchronous=NORMAL")
        store.execute(
            "CREATE TABLE IF NOT EXISTS texts "
            "(cache TEXT, key TEXT, stored_at REAL, value BLOB, PRIMARY KEY (cache, key))"
        )
        store.execute("CREATE INDEX IF NOT EXISTS age ON texts (cache, stored_at)")
        store.execute(
            "CREATE TABLE IF NOT EXISTS counters (cache TEXT, key TEXT, value INTEGER, PRIMARY KEY (cache, key))"
        )
        store.execute(f"PRAGMA busy_timeout = {round(_BUSY_S * 1000)}")
    except BaseException:
        store.close()
        raise
    return store


def _place_of(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_dev, about.st_ino


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _set_aside(path: Path) -> None:
    """Rename a damaged store, its log first: SQLite would apply the log to a new file."""
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.replace(path.with_name(f"{path.name}.damaged{suffix}"))
