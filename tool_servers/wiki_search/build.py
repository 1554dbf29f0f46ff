"""Build an index for the wiki server: ``python -m tool_servers.wiki_search.build CORPUS --output-dir FOLDER``.

After a kill, the same command continues and skips finished parts. A dense part can be added later.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from afm.errors import AfmError, DataError, MissingExtraError, UsageError, described
from afm.processes import follow_parent, receive_interrupts
from afm.terminal import ProgressView
from tool_servers.wiki_search.corpus import (
    EXPECTED,
    OFFSETS,
    STORE,
    Collector,
    Note,
    Progress,
    read_corpus,
    sample_of,
    terms_of,
)
from tool_servers.wiki_search.index import (
    DenseFacts,
    IndexManifest,
    PassageStore,
    facts_of,
    read_manifest,
    write_manifest,
)

_SAMPLE = 5_000
_GZIP_SAMPLE = 4 << 20
_BASE_MEMORY = 400 << 20


@dataclass(frozen=True, slots=True)
class Need:
    """Estimated need of a build, from the first passages and the size of the file.

    Attributes:
        passages: Number of passages.
        index_bytes: Size of the finished index.
        peak_bytes: Largest size on disk during the build, including the index.
        memory_bytes: Memory of the build.
    """

    passages: int
    index_bytes: int
    peak_bytes: int
    memory_bytes: int

    def summary(self) -> str:
        """Return the estimate as one line."""
        return (
            f"about {self.passages:,} passages; disk {_gib(self.index_bytes)} for the index, {_gib(self.peak_bytes)} during "
            f"the build; memory {_gib(self.memory_bytes)}"
        )


def estimated(corpus: Path, *, bm25: bool, dimensions: int | None, ready: Path | None = None) -> Need:
    """Estimate the need of a build.

    Args:
        dimensions: Dimensions of the vectors to compute; ``None``: no vectors.
        ready: Ready FAISS index to import.

    Raises:
        DataError: The corpus is missing, or its first lines are not passages.
    """
    rows = list(islice(read_corpus(corpus), _SAMPLE))
    if not rows:
        raise DataError(f"the corpus has no passages; {EXPECTED}", path=str(corpus))
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
    """Check that the build fits on the disk.

    Raises:
        DataError: It does not fit; says how much is free and how much is needed.
    """
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + used
    if free < need.peak_bytes:
        raise DataError(
            f"{_gib(free)} free, about {_gib(need.peak_bytes)} needed; choose another disk", path=str(folder)
        )


def _expansion(path: Path) -> float:
    """Return the compression ratio at the beginning of a file."""
    with path.open("rb") as file:
        packed = file.read(_GZIP_SAMPLE)
    return len(zlib.decompressobj(wbits=31).decompress(packed)) / len(packed)


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, round(count / 2**20))} MiB"


WORK = "unfinished"
LOCK = ".lock"
FAISS_KINDS = ("flat", "ivf", "hnsw")


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """What to build.

    Attributes:
        model: Embedding model of the dense part; ``None``: no dense part.
        faiss: ``flat``, ``ivf`` or ``hnsw``, or the path of a ready FAISS index.
        prefixes: Text before queries and passages; ``None``: depends on the name of the model.
    """

    corpus: Path
    folder: Path
    bm25: bool = True
    model: str | None = None
    faiss: str = "flat"
    prefixes: tuple[str, str] | None = None
    device: str | None = None

    @property
    def ready_faiss(self) -> Path | None:
        """The ready FAISS index to import."""
        return Path(self.faiss) if self.model and self.faiss not in FAISS_KINDS else None


def build(plan: IndexPlan, progress: Progress) -> IndexManifest:
    """Build or complete an index.

    Raises:
        DataError: The corpus is wrong, the folder has an index of another corpus, or another build is writing there.
        MissingExtraError: A library that the plan needs is not installed.
    """
    _check_libraries(plan)
    finished = _finished(plan)
    if finished and (finished.bm25 or not plan.bm25) and (finished.dense or not plan.model):
        return finished
    plan.folder.mkdir(parents=True, exist_ok=True)
    with _alone(plan.folder):
        return _built(plan, progress)


def _built(plan: IndexPlan, progress: Progress) -> IndexManifest:
    work = plan.folder / WORK
    finished = _finished(plan)
    need_bm25 = plan.bm25 and not (finished and finished.bm25)
    if finished is None or need_bm25:
        note = Collector(plan.corpus, plan.folder, work).run(None, progress)
        _write_offsets(plan.folder, work)
    else:
        size, sample = finished.corpus_bytes, finished.corpus_sample
        note = Note(plan.corpus.name, size, 0, 0, finished.passages, 0, {}, True, sample)
    bm25 = finished.bm25 if finished else None
    if need_bm25:
        from tool_servers.wiki_search.bm25 import build_bm25

        bm25 = build_bm25(note, plan.folder, work, progress)
    dense = finished.dense if finished else None
    if plan.model and dense is None:
        dense = _dense(plan, work, progress)
    files = [
        path for path in sorted(plan.folder.rglob("*")) if path.is_file() and _belongs(path, plan.folder)
    ]
    progress("checksums", 0, len(files))
    manifest = IndexManifest(
        passages=note.passages,
        corpus=note.corpus,
        corpus_bytes=note.corpus_bytes,
        corpus_sample=note.corpus_sample,
        files={path.relative_to(plan.folder).as_posix(): facts_of(path) for path in files},
        bm25=bm25,
        dense=dense,
    )
    write_manifest(plan.folder, manifest)
    shutil.rmtree(work, ignore_errors=True)
    return manifest


def _dense(plan: IndexPlan, work: Path, progress: Progress) -> DenseFacts:
    from tool_servers.wiki_search.dense import (
        Encoder,
        build_faiss,
        default_prefixes,
        encode_passages,
        take_faiss,
    )

    assert plan.model is not None
    query, passage = plan.prefixes or default_prefixes(plan.model)
    store = PassageStore(plan.folder)
    work.mkdir(exist_ok=True)
    if (ready := plan.ready_faiss) is None:
        encoder = Encoder(plan.model, query, passage, device=plan.device)
        dimensions = encoder.dimensions
        vectors = encode_passages(store, encoder, work, progress)
        build_faiss(vectors, dimensions, plan.faiss, plan.folder, progress)  # type: ignore[arg-type]
        kind = plan.faiss
    else:
        dimensions, kind = take_faiss(ready, len(store), plan.folder), "imported"
    store.close()
    facts = {"model": plan.model, "dimensions": dimensions, "faiss": kind}
    return DenseFacts.model_validate(facts | {"query_prefix": query, "passage_prefix": passage})


def _check_libraries(plan: IndexPlan) -> None:
    if find_spec("numpy") is None:
        raise MissingExtraError("numpy", "servers")
    if plan.model and find_spec("faiss") is None:
        raise MissingExtraError("faiss-cpu", "dense")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder against a second build. The system releases the lock when the process ends."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = "another build is writing into this folder; wait for it, or choose another --output-dir"
            raise DataError(message, path=str(folder)) from None
        yield


def _finished(plan: IndexPlan) -> IndexManifest | None:
    """Return the finished index in the folder, if any; refuse an index of another corpus or model."""
    finished = read_manifest(plan.folder)
    if not plan.corpus.is_file():
        raise DataError("no such file; expected a corpus of JSON lines", path=str(plan.corpus))
    if finished is None:
        return None
    problem = ""
    here = (plan.corpus.name, plan.corpus.stat().st_size)
    if (finished.corpus, finished.corpus_bytes) != here:
        held = f"{finished.corpus} ({finished.corpus_bytes:,} bytes)"
        problem = f"holds an index of {held}, got {here[0]} ({here[1]:,} bytes)"
    elif finished.corpus_sample not in (None, sample_of(plan.corpus)):
        problem = f"holds an index of another {finished.corpus} of the same size"
    elif finished.dense and plan.model and finished.dense.model != plan.model:
        problem = f"was encoded by {finished.dense.model!r}, got {plan.model!r}"
    if problem:
        raise DataError(f"{problem}; choose another --output-dir", path=str(plan.folder))
    return finished


def _belongs(path: Path, folder: Path) -> bool:
    place = path.relative_to(folder)
    return place.parts[0] in ("bm25", "dense", STORE, OFFSETS) and path.suffix != ".tmp"


def _write_offsets(folder: Path, work: Path) -> None:
    import numpy as np

    ends = np.fromfile(work / "ends.bin", np.int64)
    np.save(folder / OFFSETS, np.concatenate(([0], ends)))


def main(words: Sequence[str] | None = None) -> int:
    """Build an index. Return 0 when it is finished, 1 if the build failed, 2 for wrong usage."""
    follow_parent()
    parser = argparse.ArgumentParser(
        prog="afm serve wiki build", description="Build an index of a corpus for the wiki server."
    )
    parser.add_argument("corpus", type=Path, help='JSON lines {"id", "contents"}, may be .gz')
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the index")
    parser.add_argument("--engine", choices=("bm25", "dense", "hybrid"), default="bm25")
    parser.add_argument("--model", help="sentence-transformers model of the dense part: a folder or a name")
    parser.add_argument("--faiss", default="flat", help="flat, ivf, hnsw, or the path of a ready FAISS index")
    parser.add_argument("--query-prefix", help="text before queries (default: 'query: ' for E5 models)")
    parser.add_argument("--passage-prefix", help="text before passages (default: 'passage: ' for E5 models)")
    parser.add_argument("--device", help="device of the embedding model: cpu, cuda")
    options = parser.parse_args(words)
    try:
        receive_interrupts()
        plan = _plan(options)
        dimensions = 768 if plan.model else None
        need = estimated(plan.corpus, bm25=plan.bm25, dimensions=dimensions, ready=plan.ready_faiss)
        view = ProgressView()
        view.line(f"{plan.corpus}: {need.summary()}")
        plan.folder.mkdir(parents=True, exist_ok=True)
        check_space(need, plan.folder)
        manifest = build(plan, view.update)
    except UsageError as error:
        parser.error(str(error))
    except (AfmError, OSError) as error:
        print(f"error: {described(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; run the same command again to resume", file=sys.stderr)
        return 130
    view.line(f"{plan.folder}: {manifest.passages:,} passages, {_gib(manifest.bytes)}")
    return 0


def _plan(options: argparse.Namespace) -> IndexPlan:
    if options.engine == "bm25" and options.model:
        raise UsageError("--model is for --engine dense and hybrid")
    if options.engine != "bm25" and not options.model:
        raise UsageError(f"--engine {options.engine} needs --model, for example intfloat/e5-base-v2")
    if options.faiss not in FAISS_KINDS and not Path(options.faiss).is_file():
        raise UsageError(f"--faiss {options.faiss!r}: expected flat, ivf, hnsw, or the path of a FAISS index")
    prefixes = None
    if options.query_prefix is not None or options.passage_prefix is not None:
        prefixes = (options.query_prefix or "", options.passage_prefix or "")
    return IndexPlan(
        corpus=options.corpus,
        folder=options.output_dir,
        bm25=options.engine != "dense",
        model=options.model,
        faiss=options.faiss,
        prefixes=prefixes,
        device=options.device,
    )


if __name__ == "__main__":
    sys.exit(main())
