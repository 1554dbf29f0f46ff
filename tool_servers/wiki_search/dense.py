"""Search by embeddings in a FAISS index."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afm.errors import DataError, MissingExtraError
from tool_servers.wiki_search.dense_build import FOLDER, INDEX
from tool_servers.wiki_search.encoder import Encoder
from tool_servers.wiki_search.hits import Hits
from tool_servers.wiki_search.manifest import DenseFacts

_SHARE_OF_LISTS, _LEAST_LISTS = 0.02, 16
_HNSW_BREADTH = 128


class Dense:
    """Answers queries from the dense part of an index folder.

    Queries of one call are encoded and searched together.
    """

    def __init__(
        self,
        folder: Path,
        facts: DenseFacts,
        passages: int,
        *,
        model: str | None = None,
        device: str | None = None,
    ) -> None:
        try:
            import faiss
        except ImportError as error:
            raise MissingExtraError("faiss-cpu", "dense") from error
        self._index = _opened(faiss, folder / FOLDER / INDEX)
        if (self._index.ntotal, self._index.d) != (passages, facts.dimensions):
            raise DataError(
                f"holds {self._index.ntotal:,} vectors of {self._index.d}, expected {passages:,} of {facts.dimensions}",
                path=str(folder / FOLDER / INDEX),
            )
        self._encoder = Encoder(model or facts.model, facts.query_prefix, facts.passage_prefix, device=device)
        if self._encoder.dimensions != facts.dimensions:
            raise DataError(
                f"embedding model {model or facts.model!r} makes vectors of {self._encoder.dimensions}, the index has "
                f"{facts.dimensions}; serve with the model that it was built with"
            )
        self._one_at_a_time = threading.Lock()

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The ``k`` nearest passages for each query; scores are cosines."""
        with self._one_at_a_time:
            vectors = self._encoder.queries(queries)
            scores, numbers = self._index.search(vectors, k)
        return [
            [(int(number), float(score)) for number, score in zip(row, values, strict=True) if number >= 0]
            for row, values in zip(numbers, scores, strict=True)
        ]


def _opened(faiss: Any, path: Path) -> Any:
    """Memory-mapped where the kind of index allows it."""
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    if hasattr(index, "nprobe"):
        index.nprobe = min(index.nlist, max(_LEAST_LISTS, round(_SHARE_OF_LISTS * index.nlist)))
    if hasattr(index, "hnsw"):
        index.hnsw.efSearch = _HNSW_BREADTH
    return index
