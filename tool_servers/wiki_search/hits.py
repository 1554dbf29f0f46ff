"""What an engine finds, and how two engines' findings become one ranking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Hits = list[tuple[int, float]]
"""Numbers of passages with their scores, the best first."""

_RANK_OFFSET = 60


class Engine(Protocol):
    """Finds passages. Called from worker threads, by several at the same time."""

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The best ``k`` passages for each query, the best first."""
        ...


def fused(rankings: Sequence[Hits], k: int) -> Hits:
    """Reciprocal rank fusion (Cormack, Clarke and Buettcher 2009): the sum of ``1 / (60 + rank)``, ranks from 1."""
    scores: dict[int, float] = {}
    for hits in rankings:
        for rank, (passage, _) in enumerate(hits, 1):
            scores[passage] = scores.get(passage, 0.0) + 1 / (_RANK_OFFSET + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:k]


class Hybrid:
    """Several engines, fused by rank."""

    def __init__(self, engines: Sequence[Engine], depth: int = 50) -> None:
        self._engines, self._depth = engines, depth

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The best ``k`` passages for each query."""
        found = [engine.search(queries, max(k, self._depth)) for engine in self._engines]
        return [fused(rankings, k) for rankings in zip(*found, strict=True)]
