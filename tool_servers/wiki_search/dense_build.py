"""The dense part of an index: vectors of all passages, then a FAISS index over them.

Vectors are appended to a file as they are made; after a kill the build goes on behind the last whole one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from afm.errors import DataError
from afm.runs.atomic import replacing
from tool_servers.wiki_search.collect import Progress
from tool_servers.wiki_search.encoder import Encoder
from tool_servers.wiki_search.passages import PassageStore

FOLDER, INDEX = "dense", "index.faiss"
FaissKind = Literal["flat", "ivf", "hnsw"]
_CHUNK = 1024
_HNSW_LINKS = 32
_TRAINING_PER_LIST = 64


def encode_passages(store: PassageStore, encoder: Encoder, work: Path, progress: Progress) -> Path:
    """Write the vectors of all passages as float32; returns the file."""
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
    """Write ``dense/index.faiss``: inner products of vectors of length 1, that is cosines."""
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
    """Put a ready FAISS index (such as the published one of wiki-18) into the index folder; returns its dimensions.

    On the same file system both names stand for one file; elsewhere it is copied.

    Raises:
        DataError: It is no FAISS index, or has another number of vectors than the corpus has passages.
    """
    import shutil

    import faiss

    try:
        index = faiss.read_index(str(source), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise DataError(f"no whole FAISS index: {str(error).splitlines()[0]}", path=str(source)) from None
    if index.ntotal != passages:
        raise DataError(
            f"holds {index.ntotal:,} vectors, the corpus has {passages:,} passages", path=str(source)
        )
    (folder / FOLDER).mkdir(exist_ok=True)
    with replacing(folder / FOLDER / INDEX) as temporary:
        try:
            os.link(source.resolve(), temporary)
        except OSError:  # another file system, or one without links
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
