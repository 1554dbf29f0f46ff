"""What a cache does whatever its store is: pack texts, leave a failing store alone for a while, count on meanwhile."""

from __future__ import annotations

import time
import zlib
from collections import Counter

REST_S = 1.0
"""How long a store is left alone after a failure, so that a dead one does not slow every request down."""


def packed(text: str) -> bytes:
    """A text as stores hold it."""
    return zlib.compress(text.encode("utf-8", "replace"), 1)


def unpacked(stored: object) -> str:
    """The text again.

    Raises:
        ValueError: It is none that :func:`packed` made.
    """
    if not isinstance(stored, bytes):
        raise ValueError(f"got {type(stored).__name__}, expected bytes")
    try:
        return zlib.decompress(stored).decode()
    except zlib.error as error:
        raise ValueError(str(error)) from None


class Rest:
    """The time after a failure."""

    def __init__(self) -> None:
        self._until = float("-inf")

    def begin(self) -> None:
        """The store has just failed."""
        self._until = time.monotonic() + REST_S

    def over(self) -> bool:
        """Whether the store may be asked."""
        return time.monotonic() >= self._until


class OwnCounts:
    """Counters as this process knows them; what the store misses while it is away is added when it is back."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._stored: Counter[str] = Counter()

    def due(self, key: str, amount: int) -> int:
        """What to add to the store for ``amount`` and all that it has missed."""
        missed = self._seen[key] - self._stored[key]
        self._stored[key] = self._seen[key]
        return missed + amount

    def value(self, key: str, amount: int, due: int, stored: int | None) -> int:
        """The counter, once the store has answered ``stored`` to ``due``; ``None``: it has not."""
        if stored is None:
            self._stored[key] -= due - amount
            self._seen[key] += amount
        else:
            self._seen[key] = self._stored[key] = stored
        return self._seen[key]

    def lost(self) -> None:
        """The store is empty now."""
        self._stored.clear()
