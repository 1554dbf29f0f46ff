"""Second stage of a BM25 build: the score of every term in every passage, in the file format of bm25s.

A counting sort over pieces of the postings, so that memory does not grow with the corpus. Scores as Lucene computes them
(Robertson and Zaragoza 2009, eq. 3.15 with Lucene's idf); bm25s can open the result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from afm.errors import DataError
from tool_servers.wiki_search.collect import VOCABULARY, Note, Progress
from tool_servers.wiki_search.manifest import Bm25Facts
from tool_servers.wiki_search.terms import key_of

FOLDER = "bm25"
K1, B = 1.5, 0.75
_PIECE = 4_000_000
"""Postings sorted at a time; about 50 bytes of memory each."""


def build_bm25(note: Note, folder: Path, work: Path, progress: Progress) -> Bm25Facts:
    """Write ``bm25/`` from the files of the first stage; interrupted, it starts over.

    Raises:
        DataError: No passage holds a word.
    """
    import numpy as np

    if not note.terms:
        raise DataError(f"no passage of {note.corpus} holds a word of two letters or more")

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
    np: Any,
    terms: Any,
    counts: Any,
    distinct: Any,
    idf: Any,
    length_part: Any,
    starts: Any,
    scores: Any,
    holders: Any,
    progress: Progress,
) -> None:
    """Distribute the postings: passages stay in order within each term."""
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
