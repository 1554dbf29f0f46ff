"""Compare near-duplicate search with MinHashLSH of datasketch: pairs found by similarity, and time per row.

    .venv/bin/python benchmarks/bench_duplicates.py --out duplicates.json

A row has 200 words, which are its n-grams. The words of a pair differ according to its Jaccard similarity. With a template,
that share of the words is the same in all rows. The rival takes rows that share a band for duplicates, as in its
documentation. Seconds are processor seconds.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timing import environment, report

from afm.agents import load_agent
from afm.distill.filters.near_duplicates import DuplicateIndex, NearDuplicateSettings, Signer
from afm.trajectory.record import Record

WORDS = 200
THRESHOLDS = (0.7, 0.8, 0.9)
Finder = Callable[[int, list[str]], bool]
"""Takes a row number and words; returns whether an earlier row is a duplicate."""


def ours(threshold: float, connection: sqlite3.Connection) -> Finder:
    """Return the finder of the stage ``near_duplicates``, on single words."""
    settings = NearDuplicateSettings(text="question", ngram=1, threshold=threshold)
    signer, index = Signer(load_agent("wiki"), settings), DuplicateIndex(connection, settings)

    def find(number: int, words: list[str]) -> bool:
        record = Record(id=str(number), agent="wiki", agent_digest="", question=" ".join(words), segments=())
        return index.twin(number, record.id, signer.signature(record)) is not None

    return find


def rival(threshold: float, _: sqlite3.Connection) -> Finder:
    """Return the finder of datasketch with its defaults, in memory."""
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=threshold, num_perm=128)

    def find(number: int, words: list[str]) -> bool:
        sketch = MinHash(num_perm=128)
        sketch.update_batch([word.encode() for word in words])
        if index.query(sketch):
            return True
        index.insert(str(number), sketch)
        return False

    return find


WAYS = {"ours": ours, "datasketch": rival}


def pairs(
    way: Callable[[float, sqlite3.Connection], Finder],
    threshold: float,
    similarity: float,
    count: int,
    template: float = 0.0,
) -> tuple[float, float, int]:
    """Return the share of duplicates found, processor milliseconds per row, and the number of false positives."""
    changed = round(WORDS * (1 - similarity) / (1 + similarity))
    common = [f"template{number}" for number in range(round(WORDS * template))]
    rows = []
    for pair in range(count):
        one = common + [f"{pair}one{number}" for number in range(WORDS - len(common))]
        places = set(random.Random(pair).sample(range(WORDS), changed))
        rows += [one, [f"{pair}other{at}" if at in places else word for at, word in enumerate(one)]]
    with sqlite3.connect(":memory:") as connection:
        find = way(threshold, connection)
        begun = time.process_time()
        found = [find(number, words) for number, words in enumerate(rows)]
        seconds = time.process_time() - begun
    return sum(found[1::2]) / count, round(1000 * seconds / len(rows), 2), sum(found[::2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2_000)
    parser.add_argument("--smoke", action="store_true", help="few pairs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    count = 60 if options.smoke else options.pairs
    found: dict[str, Any] = {}
    for threshold in THRESHOLDS:
        for at in (-0.1, -0.05, -0.01, 0.005, 0.05, 0.09):
            similarity = round(threshold + at, 3)
            found[f"threshold {threshold}, similarity {similarity}"] = {
                name: round(pairs(way, threshold, similarity, count)[0], 3) for name, way in WAYS.items()
            }
    templates: dict[str, Any] = {}
    for share in (0.0, 0.5, 0.8):
        templates[f"{share:.0%} of all words the same"] = {
            name: dict(
                zip(("found", "cpu_ms_per_row", "wrong"), pairs(way, 0.8, 0.805, count, share), strict=True)
            )
            for name, way in WAYS.items()
        }
    result = {
        "benchmark": "near duplicates",
        "pairs": count,
        "found": found,
        "template, threshold 0.8, similarity 0.805": templates,
        "environment": environment(["afm", "datasketch", "numpy"]),
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
