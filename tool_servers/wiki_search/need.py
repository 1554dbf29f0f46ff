"""What a build will need, told before it starts."""

from __future__ import annotations

import shutil
import zlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from afm.errors import DataError
from tool_servers.wiki_search.passages import read_corpus
from tool_servers.wiki_search.terms import terms_of

_SAMPLE = 5_000
_GZIP_SAMPLE = 4 << 20
_BASE_MEMORY = 400 << 20


@dataclass(frozen=True, slots=True)
class Need:
    """An estimate from the first passages and the size of the file.

    Attributes:
        passages: About so many.
        index_bytes: Size of the finished index.
        peak_bytes: Largest size on disk on the way, the index included.
        memory_bytes: Of the build.
    """

    passages: int
    index_bytes: int
    peak_bytes: int
    memory_bytes: int

    def told(self) -> str:
        """In one line."""
        return (
            f"about {self.passages:,} passages; disk {_gib(self.index_bytes)} for the index, {_gib(self.peak_bytes)} on the "
            f"way; memory {_gib(self.memory_bytes)}"
        )


def estimated(corpus: Path, *, bm25: bool, dimensions: int | None, ready: Path | None = None) -> Need:
    """What building an index of ``corpus`` takes.

    Args:
        dimensions: Of the vectors that are made; ``None``: none are.
        ready: An index of vectors that is taken as it is.

    Raises:
        DataError: The corpus is missing, or its first lines are no passages.
    """
    rows = list(islice(read_corpus(corpus), _SAMPLE))
    if not rows:
        raise DataError("the corpus holds no passage", path=str(corpus))
    ratio = _expansion(corpus) if corpus.suffix == ".gz" else 1.0
    bytes_each = rows[-1].end / len(rows)
    passages = len(rows) if len(rows) < _SAMPLE else round(corpus.stat().st_size * ratio / bytes_each)
    words = [terms_of(row.passage.contents) for row in rows]
    distinct = sum(len(set(terms)) for terms in words) / len(rows)
    vocabulary = len({term for terms in words for term in terms}) * (passages / len(rows)) ** 0.6
    store = passages * (bytes_each + 8)
    index, spill, memory = store, 0.0, _BASE_MEMORY + 16.0 * passages
    if bm25:
        index += passages * distinct * 8 + vocabulary * 40
        spill += passages * (distinct * 6 + 14)
        memory += vocabulary * 200
    if ready is not None:
        index += ready.stat().st_size
    elif dimensions:
        index += passages * dimensions * 4.3
        spill += passages * dimensions * 4
        memory += passages * dimensions * 4.3 + (1 << 30)
    return Need(passages, round(index), round(index + spill), round(memory))


def check_space(need: Need, folder: Path) -> None:
    """Refuse a build that does not fit on the disk.

    Raises:
        DataError: Says what is free and what is needed.
    """
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + used
    if free < need.peak_bytes:
        raise DataError(
            f"{_gib(free)} free, about {_gib(need.peak_bytes)} needed; choose another disk", path=str(folder)
        )


def _expansion(path: Path) -> float:
    """How many times larger the beginning of a compressed file is."""
    with path.open("rb") as file:
        packed = file.read(_GZIP_SAMPLE)
    return len(zlib.decompressobj(wbits=31).decompress(packed)) / len(packed)


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, round(count / 2**20))} MiB"
