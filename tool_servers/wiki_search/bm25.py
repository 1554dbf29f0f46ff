"""Exact BM25 search over a memory-mapped index that reads only the postings it needs.

Terms are processed by their largest score, in descending order. Once the best ``k`` passages lead by more than the
remaining terms can add, no other passage can enter. From then on, only the scores of the candidates are completed
(MaxScore, Turtle and Flood 1995).

The build sorts the postings with a counting sort, piece by piece, so memory does not grow with the corpus. Scores are
those of Lucene (Robertson and Zaragoza 2009, eq. 3.15 with Lucene's idf). bm25s can open the index.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afm.errors import DataError
from tool_servers.wiki_search.corpus import VOCABULARY, Note, Progress, key_of, terms_of
from tool_servers.wiki_search.index import Bm25Facts, Hits

FOLDER = "bm25"
K1, B = 1.5, 0.75
_PIECE = 4_000_000
"""Postings sorted at a time; each needs about 50 bytes of memory."""


def build_bm25(note: Note, folder: Path, work: Path, progress: Progress) -> Bm25Facts:
    """Write ``bm25/`` from the files of the first stage; if interrupted, start over.

    Raises:
        DataError: No passage has a term.
    """
    import numpy as np

    if not note.terms:
        raise DataError(f"no passage of {note.corpus} has a word of two letters or more")

    out = folder / FOLDER
    out.mkdir(exist_ok=True)
    lengths = np.fromfile(work / "lengths.bin", np.uint32).astype(np.float32)
    distinct = np.fromfile(work / "distinct.bin", np.uint16)
    terms = np.memmap(work / "terms.bin", np.uint32, "r")
    counts = np.memmap(work / "counts.bin", np.uint16, "r")
    frequency: Any = np.zeros(note.terms, np.int64)
    for begin in range(0, len(terms), _PIECE):
        frequency += np.bincount(terms[begin : begin + _PIECE], minlength=note.terms)
    starts: Any = np.zeros(note.terms + 1, np.int64)
    np.cumsum(frequency, out=starts[1:])
    idf = np.log(1 + (note.passages - frequency + 0.5) / (frequency + 0.5)).astype(np.float32)
    length_part = (K1 * ((1 - B) + B * lengths / max(float(lengths.mean()), 1e-9))).astype(np.float32)
    scores = np.lib.format.open_memmap(out / "data.csc.index.npy", "w+", np.float32, (len(terms),))
    holders = np.lib.format.open_memmap(out / "indices.csc.index.npy", "w+", np.int32, (len(terms),))
    _fill(np, terms, counts, distinct, idf, length_part, starts, scores, holders, progress)
    np.save(out / "indptr.csc.index.npy", starts)
    np.save(out / "most.npy", np.maximum.reduceat(scores, starts[:-1]))
    _write_vocabulary(np, work / VOCABULARY, out)
    parameters = {
        "k1": K1,
        "b": B,
        "delta": 0.5,
        "method": "lucene",
        "idf_method": "lucene",
        "dtype": "float32",
        "int_dtype": "int32",
        "num_docs": note.passages,
        "version": "0.3.16",
        "backend": "numpy",
    }
    (out / "params.index.json").write_text(json.dumps(parameters, indent=2) + "\n", encoding="utf-8")
    return Bm25Facts(k1=K1, b=B, terms=note.terms, postings=len(terms))


def _fill(
    np: Any, terms: Any, counts: Any, distinct: Any, idf: Any, length_part: Any, starts: Any,
    scores: Any, holders: Any, progress: Progress,
) -> None:  # fmt: skip
    """Write the postings by term; within a term, passages stay in order."""
    heads = starts[:-1].copy()
    ends = np.cumsum(distinct, dtype=np.int64)
    first, begin = 0, 0
    while first < len(distinct):
        last = max(first + 1, int(np.searchsorted(ends, begin + _PIECE, "right")))
        end = int(ends[last - 1])
        passage = np.repeat(np.arange(first, last, dtype=np.int32), distinct[first:last])
        term, count = np.asarray(terms[begin:end]), counts[begin:end].astype(np.float32)
        value = idf[term] * count / (count + length_part[passage])
        order = np.argsort(term, kind="stable")
        term = term[order]
        present, group_begin, group_size = np.unique(term, return_index=True, return_counts=True)
        rank = np.arange(len(term)) - np.repeat(group_begin, group_size)
        place = np.repeat(heads[present], group_size) + rank
        scores[place] = value[order]
        holders[place] = passage[order]
        heads[present] += group_size
        first, begin = last, end
        progress("postings sorted", end, len(terms))
    scores.flush()
    holders.flush()


def _write_vocabulary(np: Any, source: Path, out: Path) -> None:
    words = source.read_bytes().decode("utf-8", "surrogatepass").split("\n")[:-1]
    keys = np.fromiter((key_of(word) for word in words), np.uint64, len(words))
    order = np.argsort(keys)
    np.save(out / "keys.npy", keys[order])
    np.save(out / "key_terms.npy", order.astype(np.int32))
    numbered = {word: number for number, word in enumerate(words)}
    text = json.dumps(numbered, ensure_ascii=False)
    (out / "vocab.index.json").write_text(text, encoding="utf-8", errors="replace")


_MARGIN = 1.0001
"""Tolerance for sums of 32-bit floats that are added in different orders."""


class Bm25:
    """Answers queries from an index folder. Opening it reads almost nothing."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self._np = np

        def mapped(name: str) -> Any:
            # A view as a plain array, because slicing a memmap object is several times slower.
            return np.asarray(np.load(folder / FOLDER / name, mmap_mode="r"))

        self._scores = mapped("data.csc.index.npy")
        self._holders = mapped("indices.csc.index.npy")
        self._starts = mapped("indptr.csc.index.npy")
        self._most = mapped("most.npy")
        self._keys = mapped("keys.npy")
        self._key_terms = mapped("key_terms.npy")

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Return the best ``k`` passages for each query, or fewer if fewer passages contain one of its words."""
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
        """Return the number of a term, or -1 if the corpus does not contain it."""
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
        """Add the terms that were not merged to the candidates' scores."""
        np = self._np
        for number in order:
            begin, end = int(self._starts[number]), int(self._starts[number + 1])
            holders = self._holders[begin:end]
            place = np.minimum(holders.searchsorted(passages), len(holders) - 1)
            present = holders[place] == passages
            scores = scores + np.where(present, self._scores[begin:end][place], 0) * np.float32(
                weights[number]
            )
        return scores

    def _best(self, passages: Any, scores: Any, k: int) -> Hits:
        """Return the ``k`` best passages by descending score, then by number."""
        np = self._np
        if len(scores) > k:
            bound = np.partition(scores, -k)[-k]
            passages, scores = passages[scores >= bound], scores[scores >= bound]
        order = np.lexsort((passages, -scores))[:k]
        return [(int(passages[place]), float(scores[place])) for place in order]
