"""Is a row nearly the same as an earlier one? MinHash (Broder 1997) with an index on disk.

The work is split in two. A :class:`Signer` computes a signature of one row, in any process. A
:class:`DuplicateIndex` looks for earlier rows that share a band of MinHash values, in the order of the rows, in one
process. It then compares the sets of n-grams themselves. Bands decide what is found, never what counts as similar.
The index is two tables of an SQLite file, so rows cost disk (4 bytes for each of up to 1,024 n-grams, and about 400
bytes) and no memory. A row's entries are written in the transaction that also notes the progress of the run, so a
killed run never meets its own rows.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field

from afm.agents import AgentSpec
from afm.configuration import Settings
from afm.distill.filters.contamination import CHINESE_JAPANESE
from afm.errors import MissingExtraError
from afm.trajectory.record import Record
from afm.trajectory.tags import Author

if TYPE_CHECKING:
    from numpy import uint32
    from numpy.typing import NDArray

_WORD = re.compile(f"[{CHINESE_JAPANESE}]|[^\\W{CHINESE_JAPANESE}]+")
"""Chinese and Japanese have no blanks between words: a letter counts as one."""
_ASCII = "".join(chr(code).lower() if _WORD.match(chr(code)) else " " for code in range(128))
"""Turns every character of a text that is no part of a word into a blank, and letters into small ones."""
_KEY_BYTES = 8
_GRAM_BYTES = 4
_SKETCH = 1024
"""N-grams of a row that are kept: all of most rows, those with the smallest hashes of a longer one."""
_PERMUTED = 1 << 13
"""N-grams at a time."""
_LONGEST_BAND = 32
_NEWEST = 128
"""Rows of one bucket that are looked at; more share it only when they share a text that says little."""
_MOST_CANDIDATES = 32
"""Rows that are compared."""
_TABLES = (
    "CREATE TABLE IF NOT EXISTS sketches (row INTEGER PRIMARY KEY, id TEXT NOT NULL, grams BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS bands (key INTEGER NOT NULL, row INTEGER NOT NULL, PRIMARY KEY (key, row)) "
    "WITHOUT ROWID",
)
_BUCKET = f"SELECT row FROM bands WHERE key = ? ORDER BY row DESC LIMIT {_NEWEST}"


class Compared(StrEnum):
    """Which text of a row is compared."""

    AGENT = "agent"
    """What the agent wrote: what a model learns."""
    QUESTION = "question"
    ALL = "all"
    """The response with its observations."""


class NearDuplicateSettings(Settings):
    """What counts as nearly the same."""

    text: Compared = Compared.AGENT
    threshold: float = Field(default=0.8, ge=0.1, le=1)
    """Least Jaccard similarity of the sets of word n-grams: exact for rows of fewer than 1,024 different
    n-grams, else estimated by a bottom-k sketch with a standard error of at most 0.016."""
    recall: float = Field(default=0.9, ge=0.5, le=0.99)
    """Share of the pairs of just that similarity that are compared at least; of more similar pairs it is
    larger. More costs time and disk."""
    ngram: int = Field(default=5, ge=1, le=1000)
    """Words of an n-gram."""
    permutations: int = Field(default=128, ge=16, le=1024)
    """MinHash values of a row, of which the bands are made."""
    seed: int = 1
    """Fixes the permutations."""


class _WordHashes(dict[str, int]):
    """A 32-bit hash of each word, the same in every process; at most this many are remembered."""

    _most = 1 << 18

    def __missing__(self, word: str) -> int:
        if len(self) >= self._most:
            self.clear()
        code = self[word] = zlib.crc32(word.encode())
        return code


class Signer:
    """Computes signatures: a key of each band of MinHash values, and the n-grams' hashes (the smallest: a bottom-k sketch).

    The permutations are ``a h + b`` modulo 2 to the 32 with odd ``a``, over hashes ``h`` that are mixed already.

    Raises:
        MissingExtraError: ``numpy`` is not installed.
    """

    name = "near_duplicates"

    def __init__(self, spec: AgentSpec, settings: NearDuplicateSettings) -> None:
        self.spec = spec
        self.settings = settings
        try:
            import numpy
        except ImportError as error:
            raise MissingExtraError("numpy", "filters") from error
        self._numpy = numpy
        draw = numpy.random.RandomState(settings.seed)
        drawn = draw.randint(0, 1 << 32, size=(2, settings.permutations), dtype=numpy.uint32)
        self._factors, self._offsets = drawn[0] | numpy.uint32(1), drawn[1]
        self._bands, self._rows = bands_of(settings)
        self._hashes = _WordHashes()

    def signature(self, record: Record) -> bytes:
        """The keys of the bands and the sketch; empty for a row without words."""
        words = _words(self._text(record))
        if not words:
            return b""
        hashes = self._numpy.unique(self._shingles(words))
        values = self._least(hashes)
        width = 4 * self._rows
        raw = values.astype("<u4", copy=False).tobytes()
        keys = b"".join(
            hashlib.blake2b(
                raw[at * width : (at + 1) * width], digest_size=_KEY_BYTES, salt=b"%d" % at
            ).digest()
            for at in range(self._bands)
        )
        sketch: bytes = hashes[:_SKETCH].astype("<u4", copy=False).tobytes()
        return keys + sketch

    def _least(self, hashes: NDArray[uint32]) -> NDArray[uint32]:
        """The least value of each permutation; a long row in parts, for its values are many times its text."""
        np = self._numpy
        least = np.full(self.settings.permutations, np.iinfo(np.uint32).max, np.uint32)
        for at in range(0, len(hashes), _PERMUTED):
            permuted = hashes[at : at + _PERMUTED, None] * self._factors
            permuted += self._offsets
            np.minimum(least, np.minimum.reduce(permuted, axis=0), out=least)
        return least

    def _text(self, record: Record) -> str:
        if self.settings.text is Compared.QUESTION:
            return record.question
        if self.settings.text is Compared.ALL:
            return record.text
        return "\n".join(part.text for part in record.segments if part.author is Author.AGENT)

    def _shingles(self, words: list[str]) -> NDArray[uint32]:
        """A 32-bit hash of every n-gram, of all words together where there are fewer."""
        np = self._numpy
        size = min(self.settings.ngram, len(words))
        hashes = np.fromiter(map(self._hashes.__getitem__, words), np.uint64, len(words))
        count = len(words) - size + 1
        mixed = np.zeros(count, np.uint64)
        for place in range(size):
            mixed = (mixed ^ hashes[place : place + count]) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        return (mixed >> np.uint64(32)).astype(np.uint32)


def bands_of(settings: NearDuplicateSettings) -> tuple[int, int]:
    """How many bands of how many values: the longest bands that still find enough, so that the fewest pairs are compared.

    Two rows of similarity ``s`` share a band with probability ``1 - (1 - s^rows)^bands`` (Leskovec, Rajaraman, Ullman:
    Mining of Massive Datasets, 3.4). At the threshold that has to be ``recall``. Where it cannot be, bands are single
    values.
    """
    for rows in range(min(settings.permutations, _LONGEST_BAND), 1, -1):
        bands = settings.permutations // rows
        if 1 - (1 - settings.threshold**rows) ** bands >= settings.recall:
            return bands, rows
    return settings.permutations, 1


def _words(text: str) -> list[str]:
    return text.translate(_ASCII).split() if text.isascii() else _WORD.findall(text.casefold())


class Twin(NamedTuple):
    """An earlier row that is nearly the same."""

    id: str
    similarity: float


class DuplicateIndex:
    """Signatures of the rows so far, in tables of a connection whose transactions the caller makes."""

    def __init__(self, connection: sqlite3.Connection, settings: NearDuplicateSettings) -> None:
        self._connection = connection
        self._threshold = settings.threshold
        self._key_bytes = bands_of(settings)[0] * _KEY_BYTES
        for table in _TABLES:  # not executescript, which would end the caller's transaction
            connection.execute(table)

    def twin(self, row: int, identity: str, signature: bytes) -> Twin | None:
        """The most similar earlier row, if it is similar enough; else the row is remembered.

        Args:
            row: Its number; numbers rise.
        """
        keys = [
            int.from_bytes(signature[at : at + _KEY_BYTES], "little", signed=True)
            for at in range(0, self._key_bytes, _KEY_BYTES)
        ]
        grams = signature[self._key_bytes :]
        best: Twin | None = None
        for other, similarity in self._compared(grams, self._candidates(keys)):
            if similarity >= self._threshold and (best is None or similarity > best.similarity):
                best = Twin(other, similarity)
        if best is None:
            self._connection.execute("INSERT INTO sketches VALUES (?, ?, ?)", (row, identity, grams))
            self._connection.executemany(
                "INSERT OR IGNORE INTO bands VALUES (?, ?)", [(key, row) for key in keys]
            )
        return best

    def _candidates(self, keys: Sequence[int]) -> list[int]:
        """Rows that share a band, in their order: of many those of the rarest bands, for these say most.

        In a corpus made from templates a band may hold the template alone, and then most rows share it.
        """
        weights: dict[int, float] = {}
        for key in keys:
            bucket = self._connection.execute(_BUCKET, (key,)).fetchall()
            for (row,) in bucket:
                weights[row] = weights.get(row, 0.0) + 1 / len(bucket)
        if len(weights) > _MOST_CANDIDATES:
            return sorted(sorted(weights, key=lambda row: (-weights[row], -row))[:_MOST_CANDIDATES])
        return sorted(weights)

    def _compared(self, grams: bytes, rows: Sequence[int]) -> Iterator[tuple[str, float]]:
        """Id and similarity of each row."""
        if not rows:
            return
        marks = ", ".join("?" * len(rows))
        query = f"SELECT id, grams FROM sketches WHERE row IN ({marks}) ORDER BY row"
        for identity, other in self._connection.execute(query, rows):
            shorter, longer = sorted((len(grams), len(other)))
            if shorter >= self._threshold * longer:  # else too few can be common
                yield identity, _similarity(grams, other)


def _similarity(first: bytes, other: bytes) -> float:
    """Jaccard similarity of two sketches: of all n-grams, or of the ``_SKETCH`` smallest of both where one is not whole.

    The latter is the bottom-k estimate (Cohen and Kaplan 2007).
    """
    import numpy as np

    both = np.sort(np.frombuffer(first + other, "<u4"), kind="stable")
    again = both[1:] == both[:-1]
    common, distinct = int(again.sum()), len(both) - int(again.sum())
    if max(len(first), len(other)) < _SKETCH * _GRAM_BYTES:
        return common / distinct
    seen = np.arange(2, len(both) + 1) - np.cumsum(again)  # different ones up to each but the first
    return int(again[seen <= _SKETCH].sum()) / min(distinct, _SKETCH)
