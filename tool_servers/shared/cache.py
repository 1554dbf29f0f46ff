"""A cache of texts that outlives its server: an SQLite file, or Redis shared by several machines.

A cache never fails a request: when its store is out of reach, everything is a miss, and ``errors`` counts it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from afm.errors import ConfigError, MissingExtraError
from tool_servers.shared.cache_file import OwnCounts, Rest, SqliteCache, packed, unpacked

_TIMEOUT_S = 1.0


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
        self._rest = Rest()
        self._counts = OwnCounts()
        try:
            self._redis: Any = redis.Redis.from_url(
                url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
            )
            # Connects to nothing, but reads the options in the address.
            self._redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        except (ValueError, TypeError):
            raise ConfigError("cache: got no valid Redis address, expected redis://HOST:6379/0") from None

    async def get(self, key: str) -> str | None:
        """The text, unless it is absent, too old, or Redis is away."""
        stored = await self._run(lambda: self._redis.get(self._prefix + key))
        try:
            return None if stored is None else unpacked(stored)
        except ValueError:
            self.errors += 1
            return None

    async def put(self, key: str, text: str) -> None:
        """Keep a text, if Redis is there."""
        await self._run(lambda: self._write(key, packed(text)))

    async def add(self, key: str, amount: int) -> int:
        """Add to a counter; while Redis is away, this process's own count goes on from what it last saw."""
        due = self._counts.due(key, amount)
        stored = await self._run(lambda: self._redis.incrby(f"{self._prefix}count:{key}", due))
        return self._counts.value(key, amount, due, stored)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _write(self, key: str, value: bytes) -> None:
        order = f"{self._prefix}order"
        async with self._redis.pipeline(transaction=False) as steps:
            steps.set(self._prefix + key, value, px=self._ttl_ms)
            steps.zadd(order, {key: time.time()})
            steps.zcard(order)
            *_, entries = await steps.execute()
        if entries > self._max_entries:
            dropped = await self._redis.zpopmin(order, entries - self._max_entries)
            await self._redis.delete(*(self._prefix + member.decode() for member, _ in dropped))

    async def _run(self, work: Callable[[], Any]) -> Any:
        from redis.exceptions import RedisError

        if not self._rest.over():
            self.errors += 1
            return None
        try:
            async with asyncio.timeout(2 * _TIMEOUT_S):
                return await work()
        except (RedisError, OSError, TimeoutError):
            self.errors += 1
            self._rest.begin()
            return None


class Cache(Protocol):
    """Texts by key, and counters."""

    errors: int
    """Operations that the store did not answer, and texts that it spoilt."""

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
        ConfigError: The file cannot be opened, or the address is none.
    """
    if where.startswith(("redis://", "rediss://", "unix://")):
        return RedisCache(where, name, max_entries=max_entries, ttl_s=ttl_s)
    return SqliteCache(Path(where).expanduser(), name, max_entries=max_entries, ttl_s=ttl_s)
