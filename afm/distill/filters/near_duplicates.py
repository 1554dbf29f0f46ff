"""Near duplicates of earlier rows, found by MinHash (Broder 1997) with an index on disk.

The work is split in two. A :class:`Signer` computes a signature of one row, in any process. A
:class:`DuplicateIndex` searches earlier rows that share a band of MinHash values, in the order of the rows, in one
process. It then compares the sets of n-grams themselves. Bands only select candidates. N-grams decide the similarity.
The index is two tables of an SQLite file, so rows cost disk space (4 bytes for each of up to 1,024 n-grams, and about
400 bytes) but no memory. A row's entries are written in the same transaction as the progress of the run, so a resumed
run does not find its own rows.
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
"""A word. Chinese and Japanese have no spaces between words, so each letter counts as a word."""
_ASCII = "".join(chr(code).lower() if _WORD.match(chr(code)) else " " for code in range(128))
"""Translation table that lowers letters, and replaces every character outside of words by a space."""
_KEY_BYTES = 8
_GRAM_BYTES = 4
_SKETCH = 1024
"""Maximum number of stored n-grams of a row. Of a longer row those with the smallest hashes are stored."""
_PERMUTED = 1 << 13
"""Number of n-grams processed at a time."""
_LONGEST_BAND = 32
_NEWEST = 128
"""Maximum number of examined rows of one bucket. More rows share a bucket only if its text carries little information."""
_MOST_CANDIDATES = 32
"""Maximum number of compared rows."""
_TABLES = (
    "CREATE TABLE IF NOT EXISTS sketches (row INTEGER PRIMARY KEY, id TEXT NOT NULL, grams BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS bands (key INTEGER NOT NULL, row INTEGER NOT NULL, PRIMARY KEY (key, row)) "
    "WITHOUT ROWID",
)
_BUCKET = f"SELECT row FROM bands WHERE key = ? ORDER BY row DESC LIMIT {_NEWEST}"


class Compared(StrEnum):
    """The text of a row to compare."""

    AGENT = "agent"
    """The agent's text, from which a model learns."""
    QUESTION = "question"
    ALL = "all"
    """The whole response, including observations."""


class NearDuplicateSettings(Settings):
    """What counts as a near duplicate."""

    text: Compared = Compared.AGENT
    threshold: float = Field(default=0.8, ge=0.1, le=1)
    """Minimum Jaccard similarity of the sets of word n-grams. It is exact for rows of fewer than 1,024 different n-grams.
    Otherwise a bottom-k sketch estimates it, with a standard error of at most 0.016."""
    recall: float = Field(default=0.9, ge=0.5, le=0.99)
    """Minimum share of the pairs at the threshold that are compared. It is larger for more similar pairs. A higher value
    costs time and disk space."""
    ngram: int = Field(default=5, ge=1, le=1000)
    """Number of words of an n-gram."""
    permutations: int = Field(default=128, ge=16, le=1024)
    """Number of MinHash values of a row. Bands consist of them."""
    seed: int = 1
    """Seed of the permutations."""


class _WordHashes(dict[str, int]):
    """A cache of 32-bit hashes of words, which are the same in every process. It has at most ``_most`` entries."""

    _most = 1 << 18

    def __missing__(self, word: str) -> int:
        if len(self) >= self._most:
            self.clear()
        code = self[word] = zlib.crc32(word.encode())
        return code


class Signer:
    """Computes signatures: a key for each band of MinHash values, and a bottom-k sketch of the n-grams' hashes.

    The permutations are ``a h + b`` modulo 2^32 with odd ``a``, over hashes ``h`` that are already mixed.

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
        """Return the keys of the bands and the sketch. Empty for a row without words."""
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
        """Return the smallest value of each permutation. A long row is processed in parts to bound memory."""
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
        """Return a 32-bit hash of every n-gram. A row with fewer words has one hash of all its words."""
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
    """Return the number of bands and of values per band. The longest bands with enough recall need the fewest comparisons.

    Two rows of similarity ``s`` share a band with probability ``1 - (1 - s^rows)^bands`` (Leskovec, Rajaraman, Ullman:
    Mining of Massive Datasets, 3.4). At the threshold this must be at least ``recall``. If that is impossible, bands
    are single values.
    """
    for rows in range(min(settings.permutations, _LONGEST_BAND), 1, -1):
        bands = settings.permutations // rows
        if 1 - (1 - settings.threshold**rows) ** bands >= settings.recall:
            return bands, rows
    return settings.permutations, 1


def _words(text: str) -> list[str]:
    return text.translate(_ASCII).split() if text.isascii() else _WORD.findall(text.casefold())


class Twin(NamedTuple):
    """An earlier row that is a near duplicate."""

    row: int
    id: str
    similarity: float

    def named(self, identity: str) -> str:
        """Return its name for a row called ``identity``. If the ids are equal, it has the number of the row."""
        return repr(self.id) if self.id != identity else f"row {self.row:,}, which has the same id"


class DuplicateIndex:
    """Signatures of all rows so far, in tables of a connection. The caller controls its transactions."""

    def __init__(self, connection: sqlite3.Connection, settings: NearDuplicateSettings) -> None:
        self._connection = connection
        self._threshold = settings.threshold
        self._key_bytes = bands_of(settings)[0] * _KEY_BYTES
        for table in _TABLES:  # not executescript, which would end the caller's transaction
            connection.execute(table)

    def twin(self, row: int, identity: str, signature: bytes) -> Twin | None:
        """Return the most similar earlier row if it is similar enough. Otherwise store this row.

        Args:
            row: Number of the row. Numbers must increase.
        """
        keys = [
            int.from_bytes(signature[at : at + _KEY_BYTES], "little", signed=True)
            for at in range(0, self._key_bytes, _KEY_BYTES)
        ]
        grams = signature[self._key_bytes :]
        best: Twin | None = None
        for twin in self._compared(grams, self._candidates(keys)):
            if twin.similarity >= self._threshold and (best is None or twin.similarity > best.similarity):
                best = twin
        if best is None:
            self._connection.execute("INSERT INTO sketches VALUES (?, ?, ?)", (row, identity, grams))
            self._connection.executemany(
                "INSERT OR IGNORE INTO bands VALUES (?, ?)", [(key, row) for key in keys]
            )
        return best

    def _candidates(self, keys: Sequence[int]) -> list[int]:
        """Return the rows that share a band, in order. If there are too many, rows of the rarest bands are preferred.

        In a corpus made from templates, a band may hold only the template, and most rows share it.
        """
        weights: dict[int, float] = {}
        for key in keys:
            bucket = self._connection.execute(_BUCKET, (key,)).fetchall()
            for (row,) in bucket:
                weights[row] = weights.get(row, 0.0) + 1 / len(bucket)
        if len(weights) > _MOST_CANDIDATES:
            return sorted(sorted(weights, key=lambda row: (-weights[row], -row))[:_MOST_CANDIDATES])
        return sorted(weights)

    def _compared(self, grams: bytes, rows: Sequence[int]) -> Iterator[Twin]:
        """Yield each row that may be similar enough."""
        if not rows:
            return
        marks = ", ".join("?" * len(rows))
        query = f"SELECT row, id, grams FROM sketches WHERE row IN ({marks}) ORDER BY row"
        for row, identity, other in self._connection.execute(query, rows):
            shorter, longer = sorted((len(grams), len(other)))
            if shorter >= self._threshold * longer:  # otherwise too few n-grams can be shared
                yield Twin(row, identity, _similarity(grams, other))


def _similarity(first: bytes, other: bytes) -> float:
    """Return the Jaccard similarity of two sketches.

    If a sketch is incomplete, the ``_SKETCH`` smallest hashes of both give the bottom-k estimate (Cohen and Kaplan 2007).
    """
    import numpy as np

    both = np.sort(np.frombuffer(first + other, "<u4"), kind="stable")
    again = both[1:] == both[:-1]
    common, distinct = int(again.sum()), len(both) - int(again.sum())
    if max(len(first), len(other)) < _SKETCH * _GRAM_BYTES:
        return common / distinct
    seen = np.arange(2, len(both) + 1) - np.cumsum(
        again
    )  # number of different values up to each one after the first
    return int(again[seen <= _SKETCH].sum()) / min(distinct, _SKETCH)
