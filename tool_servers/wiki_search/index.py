"""An index folder: its manifest and its passages.

The manifest is written last, so a folder without a manifest is unfinished. A folder that differs from it is refused.
"""

from __future__ import annotations

import json
import mmap
import shlex
import zlib
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from afm.configuration import Settings
from afm.errors import DataError, first_fault
from afm.runs.atomic import replace_text
from tool_servers.wiki_search.corpus import OFFSETS, STORE, CorpusPassage

NAME = "manifest.json"
_EDGE = 1 << 16


class FileFacts(Settings):
    """Size and checksums of a file."""

    bytes: int
    edges: int
    """CRC-32 of the first and last 64 KiB; distinguishes two builds without reading everything."""
    crc32: int
    """CRC-32 of all bytes."""


class Bm25Facts(Settings):
    """Parameters of the BM25 part."""

    k1: float
    b: float
    terms: int
    postings: int


class DenseFacts(Settings):
    """Parameters of the dense part; queries must be encoded by the same model in the same way."""

    model: str
    dimensions: int
    faiss: Literal["flat", "ivf", "hnsw", "imported"]
    query_prefix: str
    passage_prefix: str


class IndexManifest(Settings):
    """The content of ``manifest.json``."""

    format: Literal[1] = 1
    passages: int
    corpus: str
    """Name of the corpus file."""
    corpus_bytes: int
    """Size of the corpus file."""
    corpus_sample: int | None = None
    """CRC-32 of pieces of the corpus file; ``None`` in older indexes."""
    files: dict[str, FileFacts]
    """Files by path below the index folder."""
    bm25: Bm25Facts | None = None
    dense: DenseFacts | None = None

    @property
    def bytes(self) -> int:
        """Size of the index on disk."""
        return sum(facts.bytes for facts in self.files.values())


def facts_of(path: Path) -> FileFacts:
    """Return the size and checksums of a file."""
    crc, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            crc = zlib.crc32(piece, crc)
    return FileFacts(bytes=size, edges=_edges(path), crc32=crc)


def write_manifest(folder: Path, manifest: IndexManifest) -> None:
    """Write the manifest, which marks the index as finished."""
    replace_text(folder / NAME, manifest.model_dump_json(indent=2, exclude_none=True) + "\n")


def read_manifest(folder: Path) -> IndexManifest | None:
    """Read the manifest of an index folder; return ``None`` if it is missing.

    Raises:
        DataError: The manifest is invalid.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        return IndexManifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{first_fault(error)}; build the index again", path=str(path)) from None


def checked_manifest(folder: Path, *, whole: bool = False) -> IndexManifest:
    """Check an index folder against its manifest, and return the manifest.

    Args:
        whole: Compare every byte; otherwise sizes and both ends of every file.

    Raises:
        DataError: The index is unfinished, truncated, or mixed from different builds.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(
            f"no finished index here ({NAME} is missing); build it with: afm serve wiki build CORPUS.jsonl "
            f"--output-dir {shlex.quote(str(folder))}",
            path=str(folder),
        )
    for name, facts in manifest.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != facts.bytes:
            got = "it is missing" if size is None else f"it has {size:,} bytes"
            raise DataError(
                f"{got}, expected {facts.bytes:,}: the index is truncated; build it again", path=str(path)
            )
        same = facts_of(path) == facts if whole else _edges(path) == facts.edges
        if not same:
            raise DataError("its content differs from what was built; build the index again", path=str(path))
    return manifest


def _edges(path: Path) -> int:
    with path.open("rb") as file:
        crc = zlib.crc32(file.read(_EDGE))
        file.seek(max(0, path.stat().st_size - _EDGE))
        return zlib.crc32(file.read(_EDGE), crc)


class PassageStore:
    """Passages by number, read on demand from a memory-mapped file.

    Raises:
        DataError: The number of passages is not the ``expected`` one.
    """

    def __init__(self, folder: Path, *, expected: int | None = None) -> None:
        import numpy as np

        self._offsets: Any = np.asarray(np.load(folder / OFFSETS, mmap_mode="r"))
        if expected is not None and len(self) != expected:
            raise DataError(f"has {len(self):,} passages, expected {expected:,}", path=str(folder / OFFSETS))
        self._file = (folder / STORE).open("rb")
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> CorpusPassage:
        row = json.loads(self.raw(number))
        return CorpusPassage(row["id"], row["contents"])

    def raw(self, number: int) -> bytes:
        """Return a passage as the JSON object ``{"id", "contents"}``."""
        return self._map[int(self._offsets[number]) : int(self._offsets[number + 1]) - 1]

    def range(self, begin: int, end: int) -> list[CorpusPassage]:
        """Return the passages from ``begin`` up to ``end``, exclusive."""
        return [self[number] for number in range(begin, min(end, len(self)))]

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
        self._file.close()


Hits = list[tuple[int, float]]
"""Numbers of passages with their scores, best first."""
