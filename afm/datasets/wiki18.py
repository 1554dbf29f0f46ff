"""The Wikipedia of 2018 in 21 million passages, and published E5 indexes of it, for the wiki server.

Source: the corpus and indexes of Search-R1 (arXiv 2503.09516). The passages are those of DPR (arXiv 2004.04906).
"""

from __future__ import annotations

import gzip
import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afm.choices import PublishedIndex
from afm.datasets.hub import (
    MIB,
    Checksum,
    HubFile,
    Progress,
    fetch,
    fetch_partial,
    format_size,
    hub_files,
    pieces,
)
from afm.errors import DataError
from afm.runs.atomic import replace_text, replacing

CORPUS = "wiki-18.jsonl.gz"
MODEL = "intfloat/e5-base-v2"
"""The model of the published indexes' vectors. It must also encode the queries."""

_CORPUS_REPOSITORY = "PeterJinGo/wiki-18-corpus"
_PART = "part_"
_GUNZIPPED = 3.2
"""Approximate ratio of the corpus's uncompressed size to its compressed size."""
_READ_BYTES = 4 * MIB


_INDEXES = {
    PublishedIndex.FLAT: ("PeterJinGo/wiki-18-e5-index", "e5_Flat.index"),
    PublishedIndex.HNSW: ("PeterJinGo/wiki-18-e5-index-HNSW64", "e5_HNSW64.index"),
}


@dataclass(frozen=True, slots=True)
class Download:
    """The files to download into ``folder``.

    Attributes:
        parts: Parts of the index in order. Empty for only the corpus.
        index: Name of the file that the parts become.
        gunzip: Whether to also write the uncompressed corpus.
    """

    folder: Path
    corpus: HubFile
    parts: tuple[HubFile, ...]
    index: str
    gunzip: bool

    @property
    def index_path(self) -> Path | None:
        """The path of the whole index."""
        return self.folder / self.index if self.parts else None

    @property
    def bytes_to_fetch(self) -> int:
        """Bytes of all files, including those that exist already."""
        return self.corpus.size + sum(part.size for part in self.parts)

    @property
    def bytes_at_most(self) -> int:
        """Peak disk usage in bytes: all files, and the largest part next to the index that it is appended to."""
        text = round(self.corpus.size * _GUNZIPPED) if self.gunzip else 0
        return self.bytes_to_fetch + text + max((part.size for part in self.parts), default=0)

    def summary(self) -> str:
        """Describe the download in one line."""
        return (
            f"{format_size(self.bytes_to_fetch)} to fetch; peak disk usage {format_size(self.bytes_at_most)}"
        )


def planned(folder: Path, index: PublishedIndex, *, gunzip: bool = False) -> Download:
    """Plan a download of the files on the Hub."""
    [*corpora] = (file for file in hub_files(_CORPUS_REPOSITORY) if file.name == CORPUS)
    if len(corpora) != 1:
        raise DataError(f"dataset {_CORPUS_REPOSITORY} holds no {CORPUS}")
    if index is PublishedIndex.NONE:
        return Download(folder, corpora[0], (), "", gunzip)
    repository, name = _INDEXES[index]
    parts = tuple(file for file in hub_files(repository) if file.name.startswith(_PART))
    if not parts:
        raise DataError(f"dataset {repository} holds no files {_PART}aa, {_PART}ab ...")
    return Download(folder, corpora[0], parts, name, gunzip)


def check_space(download: Download) -> None:
    """Raise an error if a download does not fit on the disk."""
    download.folder.mkdir(parents=True, exist_ok=True)
    used = sum(path.stat().st_size for path in download.folder.iterdir() if path.is_file())
    free = shutil.disk_usage(download.folder).free + used
    if free < download.bytes_at_most:
        raise DataError(
            f"{format_size(free)} free, {format_size(download.bytes_at_most)} needed; choose another disk",
            path=str(download.folder),
        )


def run(download: Download, progress: Progress) -> None:
    """Download everything. If interrupted, the same call resumes."""
    corpus = fetch(download.corpus, download.folder, progress)
    if download.gunzip:
        _gunzip(corpus, progress)
    if download.index_path is not None:
        join(download.parts, download.index_path, progress)


def commands(download: Download, index_folder: Path) -> list[list[str]]:
    """Return the commands that build the wiki server's index from the downloaded files and serve it."""
    build = [
        "afm",
        "serve",
        "wiki",
        "build",
        str(download.folder / CORPUS),
        "--output-dir",
        str(index_folder),
    ]
    if download.index_path is not None:
        build += ["--engine", "dense", "--model", MODEL, "--faiss", str(download.index_path)]
    return [build, ["afm", "serve", "wiki", "--index", str(index_folder)]]


def join(parts: Sequence[HubFile], path: Path, progress: Progress) -> None:
    """Download parts and append them in order to a file. Each part is verified, and removed once appended."""
    if path.is_file() and path.stat().st_size == sum(part.size for part in parts):
        return
    growing, note = path.with_name(f"{path.name}.partial"), path.with_name(f"{path.name}.json")
    joined = _joined(note, parts)
    growing.touch()
    for number, part in enumerate(parts[joined:], joined):
        source = fetch_partial(part, path.parent, progress)
        _append(source, part, growing, sum(earlier.size for earlier in parts[:number]), progress)
        replace_text(note, json.dumps([done.checksum for done in parts[: number + 1]]))
        source.unlink()
    growing.replace(path)
    note.unlink(missing_ok=True)


def _joined(note: Path, parts: Sequence[HubFile]) -> int:
    """Return the number of parts that the partial file certainly contains."""
    try:
        noted = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    return len(noted) if noted == [part.checksum for part in parts[: len(noted)]] else 0


def _append(source: Path, part: HubFile, growing: Path, start: int, progress: Progress) -> None:
    checksum = Checksum(part)
    with growing.open("r+b") as sink:
        sink.truncate(start)  # drop an incomplete part after a kill
        sink.seek(start)
        for piece in pieces(source):
            checksum.add(piece)
            sink.write(piece)
            done = sink.tell() - start
            progress(f"MiB of {part.name} joined", done // MIB, -(-part.size // MIB))
    checksum.check(source)


def _gunzip(packed: Path, progress: Progress) -> None:
    path = packed.with_suffix("")
    if path.is_file():
        return
    with replacing(path) as temporary:
        try:
            with gzip.open(packed) as source, temporary.open("wb") as sink:
                while piece := source.read(_READ_BYTES):
                    sink.write(piece)
                    progress(f"MiB of {path.name}", sink.tell() // MIB, None)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"cannot be decompressed: {error}", path=str(packed)) from None
