"""Search by embeddings in a FAISS index, and the build of that index.

Any sentence-transformers model can compute the vectors; E5 models get the prefixes of their training. Vectors are
appended to a file. After a kill, the build continues after the last complete vector.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from afm.errors import DataError, EngineError, MissingExtraError
from afm.runs.atomic import replacing
from tool_servers.wiki_search.corpus import Progress
from tool_servers.wiki_search.index import DenseFacts, Hits, PassageStore

_BATCH = 64


def default_prefixes(model: str) -> tuple[str, str]:
    """Return the text before queries and passages: ``query: `` and ``passage: `` for E5 models, else empty texts."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    is_e5 = "e5" in name.replace("_", "-").split("-")
    return ("query: ", "passage: ") if is_e5 else ("", "")


class Encoder:
    """Encodes texts as vectors of length 1.

    Args:
        model: Folder or name of a sentence-transformers model.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        EngineError: The model cannot be loaded.
    """

    def __init__(
        self, model: str, query_prefix: str, passage_prefix: str, *, device: str | None = None
    ) -> None:
        if find_spec("sentence_transformers") is None:
            raise MissingExtraError("sentence-transformers", "dense")
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()

        self._query_prefix, self._passage_prefix = query_prefix, passage_prefix
        try:
            self._model = SentenceTransformer(model, device=device)
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"embedding model {model!r} cannot be loaded: {error}") from error
        self.dimensions = int(self._model.get_embedding_dimension() or 0)

    def queries(self, texts: Sequence[str]) -> Any:
        """Return the vectors of queries, float32, shape (texts, dimensions)."""
        return self._encoded([self._query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> Any:
        """Return the vectors of passages, float32, shape (texts, dimensions); the end of too long texts is cut off."""
        return self._encoded([self._passage_prefix + text for text in texts])

    def _encoded(self, texts: list[str]) -> Any:
        return self._model.encode(
            texts,
            batch_size=_BATCH,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )


FOLDER, INDEX = "dense", "index.faiss"
FaissKind = Literal["flat", "ivf", "hnsw"]
_CHUNK = 1024
_HNSW_LINKS = 32
_TRAINING_PER_LIST = 64


def encode_passages(store: PassageStore, encoder: Encoder, work: Path, progress: Progress) -> Path:
    """Write the vectors of all passages as float32, and return the file."""
    path = work / "vectors.bin"
    path.touch()
    row_bytes = 4 * encoder.dimensions
    done = path.stat().st_size // row_bytes
    with path.open("r+b") as file:
        file.truncate(done * row_bytes)
        file.seek(done * row_bytes)
        while done < len(store):
            texts = [passage.contents for passage in store.range(done, done + _CHUNK)]
            file.write(encoder.passages(texts).astype("float32").tobytes())
            file.flush()
            done += len(texts)
            progress("passages encoded", done, len(store))
    return path


def build_faiss(vectors: Path, dimensions: int, kind: FaissKind, folder: Path, progress: Progress) -> None:
    """Write ``dense/index.faiss``; its scores are inner products of vectors of length 1, so cosines."""
    import faiss
    import numpy as np

    data: Any = np.memmap(vectors, np.float32, "r").reshape(-1, dimensions)
    index = _empty(faiss, np, data, kind)
    for begin, piece in _pieces(np, data):
        index.add(piece)
        progress("vectors indexed", begin + len(piece), len(data))
    (folder / FOLDER).mkdir(exist_ok=True)
    with replacing(folder / FOLDER / INDEX) as temporary:
        faiss.write_index(index, str(temporary))


def take_faiss(source: Path, passages: int, folder: Path) -> int:
    """Put a ready FAISS index, such as the published one of wiki-18, into the index folder; return its dimensions.

    Makes a hard link on the same file system, otherwise a copy.

    Raises:
        DataError: It is not a FAISS index, or its number of vectors is not the number of passages.
    """
    import shutil

    import faiss

    try:
        index = faiss.read_index(str(source), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise DataError(
            f"not a complete FAISS index: {str(error).splitlines()[0]}", path=str(source)
        ) from None
    if index.ntotal != passages:
        raise DataError(
            f"holds {index.ntotal:,} vectors, the corpus has {passages:,} passages", path=str(source)
        )
    (folder / FOLDER).mkdir(exist_ok=True)
    with replacing(folder / FOLDER / INDEX) as temporary:
        try:
            os.link(source.resolve(), temporary)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(source, temporary)
    return int(index.d)


def _empty(faiss: Any, np: Any, data: Any, kind: FaissKind) -> Any:
    dimensions = data.shape[1]
    if kind == "flat":
        return faiss.IndexFlatIP(dimensions)
    if kind == "hnsw":
        return faiss.IndexHNSWFlat(dimensions, _HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    lists = max(1, min(65_536, round(4 * len(data) ** 0.5), len(data) // 39))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dimensions), dimensions, lists, faiss.METRIC_INNER_PRODUCT)
    step = max(1, len(data) // (lists * _TRAINING_PER_LIST))
    index.train(np.ascontiguousarray(data[::step]))
    return index


def _pieces(np: Any, data: Any) -> Iterator[tuple[int, Any]]:
    for begin in range(0, len(data), 65_536):
        yield begin, np.ascontiguousarray(data[begin : begin + 65_536])


_SHARE_OF_LISTS, _LEAST_LISTS = 0.02, 16
_HNSW_BREADTH = 128


class Dense:
    """Answers queries from the dense part of an index folder; encodes and searches the queries of a call together."""

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
                f"{facts.dimensions}; use the model that the index was built with"
            )
        self._one_at_a_time = threading.Lock()

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Return the ``k`` nearest passages for each query; scores are cosines."""
        with self._one_at_a_time:
            vectors = self._encoder.queries(queries)
            scores, numbers = self._index.search(vectors, k)
        return [
            [(int(number), float(score)) for number, score in zip(row, values, strict=True) if number >= 0]
            for row, values in zip(numbers, scores, strict=True)
        ]


def _opened(faiss: Any, path: Path) -> Any:
    """Open an index, memory-mapped if its kind allows it."""
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    if hasattr(index, "nprobe"):
        index.nprobe = min(index.nlist, max(_LEAST_LISTS, round(_SHARE_OF_LISTS * index.nlist)))
    if hasattr(index, "hnsw"):
        index.hnsw.efSearch = _HNSW_BREADTH
    return index
