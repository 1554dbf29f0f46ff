"""Is a row nearly the same as an earlier one? MinHash (Broder 1997) with an index on disk.

The work is split in two. A :class:`Signer` computes a signature of one row, in any process. A
:class:`DuplicateIndex` compares it with all earlier ones, in the order of the rows, in one process. The index is
a table of an SQLite file, so a million rows cost disk (about 400 bytes each) and no memory; a row's entries are
written in the transaction that also says how far the run is, so that a killed run never meets its own rows.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import zlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from pydantic import Field

from afm.agents import AgentSpec
from afm.distill.filters.base import FilterSettings
from afm.errors import MissingExtraError
from afm.trajectory.record import Record
from afm.trajectory.types import Author

if TYPE_CHECKING:
    from numpy import uint32
    from numpy.typing import NDArray

_WORD = re.compile(r"\w+")
_ASCII = "".join(chr(code).lower() if _WORD.match(chr(code)) else " " for code in range(128))
"""Turns every character of a text that is no part of a word into a blank, and letters into small ones."""
_KEY_BYTES = 8
_MOST_CANDIDATES = 64
"""Rows of one bucket that are compared; more share it only when they share a text that says little."""
_TABLES = (
    "CREATE TABLE IF NOT EXISTS signatures (row INTEGER PRIMARY KEY, id TEXT NOT NULL, bits BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS bands (key INTEGER NOT NULL, row INTEGER NOT NULL, PRIMARY KEY (key, row)) "
    "WITHOUT ROWID",
)


class Compared(StrEnum):
    """Which text of a row is compared."""

    AGENT = "agent"
    """What the agent wrote: what a model learns."""
    QUESTION = "question"
    ALL = "all"
    """The response with its observations."""


class NearDuplicateSettings(FilterSettings):
    """What counts as nearly the same.

    Attributes:
        threshold: Least estimated Jaccard similarity of the sets of word n-grams.
        ngram: Words of an n-gram.
        permutations: Length of a signature; the estimate's standard error is at most 0.5 / sqrt(permutations).
        seed: Fixes the permutations.
    """

    text: Compared = Compared.AGENT
    threshold: float = Field(default=0.8, gt=0, le=1)
    ngram: int = Field(default=5, ge=1)
    permutations: int = Field(default=128, ge=16, le=1024)
    seed: int = 1


class _WordHashes(dict[str, int]):
    """A 32-bit hash of each word, the same in every process; so many are remembered at most."""

    _most = 1 << 18

    def __missing__(self, word: str) -> int:
        if len(self) >= self._most:
            self.clear()
        found = self[word] = zlib.crc32(word.encode())
        return found


class Signer:
    """Computes signatures: one byte of each MinHash value (b-bit MinHash, Li and König 2010) and a key a band.

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
        self._bands, self._rows = best_bands(min(settings.threshold, 0.999), settings.permutations)
        self._hashes = _WordHashes()

    def signature(self, record: Record) -> bytes:
        """The keys of the bands and the bytes of the values; empty for a row without words."""
        words = _words(self._text(record))
        if not words:
            return b""
        hashes = self._shingles(words)
        permuted = hashes[:, None] * self._factors
        permuted += self._offsets
        values = self._numpy.minimum.reduce(permuted, axis=0)
        width = 4 * self._rows
        raw = values.astype("<u4", copy=False).tobytes()
        keys = b"".join(
            hashlib.blake2b(
                raw[at * width : (at + 1) * width], digest_size=_KEY_BYTES, salt=b"%d" % at
            ).digest()
            for at in range(self._bands)
        )
        bits: bytes = values.astype("u1").tobytes()
        return bytes([self._bands]) + keys + bits

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


@lru_cache
def best_bands(threshold: float, permutations: int) -> tuple[int, int]:
    """How many bands of how many values tell pairs at least so similar from others best.

    Two rows meet in a band with probability ``1 - (1 - s^rows)^bands`` at similarity ``s``. What that gives to pairs below the
    threshold and withholds from those above, over all ``s`` evenly, is made least (Leskovec, Rajaraman, Ullman: Mining of
    Massive Datasets, 3.4).
    """
    import numpy as np

    steps = (np.arange(1_000) + 0.5) / 1_000
    below, above = threshold * steps, threshold + (1 - threshold) * steps
    least, best = float("inf"), (1, permutations)
    for rows in range(permutations, 0, -1):
        missed_below, missed_above = 1 - below**rows, 1 - above**rows
        for bands in range(1, permutations // rows + 1):
            wrong = (
                threshold * (1 - missed_below**bands).mean() + (1 - threshold) * (missed_above**bands).mean()
            )
            if wrong < least:
                least, best = float(wrong), (bands, rows)
    return best


def _words(text: str) -> list[str]:
    return text.translate(_ASCII).split() if text.isascii() else _WORD.findall(text.casefold())


@dataclass(frozen=True, slots=True)
class Twin:
    """An earlier row that is nearly the same."""

    id: str
    similarity: float


class DuplicateIndex:
    """Signatures of the rows so far, in tables of a connection whose transactions the caller makes."""

    def __init__(self, connection: sqlite3.Connection, settings: NearDuplicateSettings) -> None:
        self._connection = connection
        self._threshold = settings.threshold
        for table in _TABLES:  # not executescript, which would end the caller's transaction
            connection.execute(table)

    def twin(self, row: int, identity: str, signature: bytes) -> Twin | None:
        """The most similar earlier row, if it is similar enough; else the row is remembered.

        Args:
            row: Its number; numbers rise.
        """
        parts = _Parts(signature)
        marks = ", ".join("?" * len(parts.keys))
        query = (
            "SELECT row, id, bits FROM signatures WHERE row IN "
            f"(SELECT row FROM bands WHERE key IN ({marks}) ORDER BY row LIMIT {_MOST_CANDIDATES}) ORDER BY row"
        )
        best: Twin | None = None
        for _, other, bits in self._connection.execute(query, parts.keys):
            similarity = _similarity(parts.bits, bits)
            if similarity >= self._threshold and (best is None or similarity > best.similarity):
                best = Twin(other, similarity)
        if best is None:
            self._remember(row, identity, parts)
        return best

    def _remember(self, row: int, identity: str, parts: _Parts) -> None:
        self._connection.execute("INSERT INTO signatures VALUES (?, ?, ?)", (row, identity, parts.bits))
        self._connection.executemany(
            "INSERT OR IGNORE INTO bands VALUES (?, ?)", [(key, row) for key in parts.keys]
        )


@dataclass(frozen=True)
class _Parts:
    signature: bytes

    @cached_property
    def keys(self) -> tuple[int, ...]:
        raw = self.signature[1 : self._end]
        return tuple(
            int.from_bytes(raw[at : at + _KEY_BYTES], "little", signed=True)
            for at in range(0, len(raw), _KEY_BYTES)
        )

    @cached_property
    def bits(self) -> bytes:
        return self.signature[self._end :]

    @property
    def _end(self) -> int:
        return 1 + self.signature[0] * _KEY_BYTES


def _similarity(one: bytes, other: bytes) -> float:
    """Estimated Jaccard similarity: equal bytes, less those that are equal by chance (1 of 256)."""
    equal = sum(map(int.__eq__, one, other)) / len(one)
    return max(0.0, (equal - 1 / 256) / (1 - 1 / 256))
