"""A cache of texts that outlives its server: an SQLite file, or Redis shared by several machines.

A cache never fails a request: when its store is out of reach, everything is a miss, and ``errors`` counts it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tool_servers.shared.cache_file import SqliteCache
from tool_servers.shared.cache_redis import RedisCache


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
