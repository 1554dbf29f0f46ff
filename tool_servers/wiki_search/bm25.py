"""BM25 search over a memory-mapped index: exact, and touching only what can matter.

Terms are taken by falling greatest score. As soon as the best ``k`` so far lead by more than all further terms can add, no
other passage can enter; the candidates are then only completed (MaxScore, Turtle and Flood 1995).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tool_servers.wiki_search.bm25_build import FOLDER
from tool_servers.wiki_search.hits import Hits
from tool_servers.wiki_search.terms import key_of, terms_of

_MARGIN = 1.0001
"""Scores are sums of 32-bit floats, whose order of addition differs."""


class Bm25:
    """Answers queries from an index folder; opening reads almost nothing."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self._np = np

        def mapped(name: str) -> Any:
            # A view of the plain array type: slicing a memmap object is several times slower.
            return np.asarray(np.load(folder / FOLDER / name, mmap_mode="r"))

        self._scores = mapped("data.csc.index.npy")
        self._holders = mapped("indices.csc.index.npy")
        self._starts = mapped("indptr.csc.index.npy")
        self._most = mapped("most.npy")
        self._keys = mapped("keys.npy")
        self._key_terms = mapped("key_terms.npy")

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The best ``k`` passages for each query; fewer when fewer hold one of its words."""
        return [self._one(query, k) for query in queries]

    def _one(self, query: str, k: int) -> Hits:
        weights = {
            number: weight
            for word, weight in Counter(terms_of(query)).items()
            if (number := self._term(word)) >= 0
        }
        order = sorted(weights, key=lambda number: -weights[number] * float(self._most[number]))
        if not order:
            return []
        rest = [0.0]
        for number in reversed(order):
            rest.append(rest[-1] + weights[number] * float(self._most[number]))
        rest.reverse()
        np = self._np
        passages, scores = self._list(order[0], weights[order[0]])
        for place, number in enumerate(order[1:], 1):
            best = float(np.partition(scores, -k)[-k]) if len(scores) >= k else 0.0
            if rest[place] * _MARGIN < best:
                keep = scores + rest[place] * _MARGIN >= best
                passages, scores = (
                    passages[keep],
                    self._completed(passages[keep], scores[keep], order[place:], weights),
                )
                break
            passages, scores = self._merged(passages, scores, number, weights[number])
        return self._best(passages, scores, k)

    def _term(self, word: str) -> int:
        """Number of a term, -1 for one that the corpus lacks."""
        key = self._np.uint64(key_of(word))
        place = int(self._keys.searchsorted(key))
        return int(self._key_terms[place]) if place < len(self._keys) and self._keys[place] == key else -1

    def _list(self, number: int, weight: int) -> tuple[Any, Any]:
        begin, end = int(self._starts[number]), int(self._starts[number + 1])
        scores = self._scores[begin:end]
        return self._holders[begin:end], scores if weight == 1 else scores * self._np.float32(weight)

    def _merged(self, passages: Any, scores: Any, number: int, weight: int) -> tuple[Any, Any]:
        np = self._np
        others, more = self._list(number, weight)
        both = np.concatenate((passages, others))
        order = np.argsort(both, kind="stable")
        both, values = both[order], np.concatenate((scores, more))[order]
        begins = np.flatnonzero(np.concatenate(([True], both[1:] != both[:-1])))
        return both[begins], np.add.reduceat(values, begins)

    def _completed(self, passages: Any, scores: Any, order: Sequence[int], weights: dict[int, int]) -> Any:
        """The candidates' scores with the terms that were not merged."""
        np = self._np
        for number in order:
            begin, end = int(self._starts[number]), int(self._starts[number + 1])
            holders = self._holders[begin:end]
            place = np.minimum(holders.searchsorted(passages), len(holders) - 1)
            found = holders[place] == passages
            scores = scores + np.where(found, self._scores[begin:end][place], 0) * np.float32(weights[number])
        return scores

    def _best(self, passages: Any, scores: Any, k: int) -> Hits:
        """Falling scores; of equals the earlier passage."""
        np = self._np
        if len(scores) > k:
            bound = np.partition(scores, -k)[-k]
            passages, scores = passages[scores >= bound], scores[scores >= bound]
        order = np.lexsort((passages, -scores))[:k]
        return [(int(passages[place]), float(scores[place])) for place in order]
