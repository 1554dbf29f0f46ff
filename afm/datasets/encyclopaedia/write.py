"""A world as files: corpus, questions, web site, manifest."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from afm.datasets.encyclopaedia.questions import DATA_SOURCE, HOPS, SHAPES, Shape, generate
from afm.datasets.encyclopaedia.world import Encyclopaedia
from afm.datasets.mini_world import Split
from afm.datasets.schema import write_tasks
from afm.runs.atomic import replacing
from afm.runs.folder import write_manifest

Progress = Callable[[str, int, int | None], None]
_STEP = 10_000


def corpus_lines(world: Encyclopaedia, numbers: Iterable[int] | None = None) -> Iterator[str]:
    """Stream passages as JSON lines ``{"id", "contents"}``; all pages by default."""
    for number in range(world.size) if numbers is None else numbers:
        row = {"id": str(number), "contents": world.page(number).contents}
        yield json.dumps(row, ensure_ascii=False) + "\n"


def write_corpus(world: Encyclopaedia, path: Path, progress: Progress | None = None) -> None:
    """Write the corpus, compressed when ``path`` ends in ``.gz``; ``path`` appears when it is whole."""
    with replacing(path) as temporary, _opened(temporary, path.suffix == ".gz") as file:
        for number, line in enumerate(corpus_lines(world), 1):
            file.write(line)
            if progress and (number % _STEP == 0 or number == world.size):
                progress("passages", number, world.size)


def write_encyclopaedia(
    out_dir: str | Path,
    world: Encyclopaedia,
    *,
    sizes: Mapping[Split, int],
    seed: int,
    hops: Sequence[int] = HOPS,
    shapes: Sequence[Shape] = SHAPES,
    progress: Progress | None = None,
) -> dict[Split, Path]:
    """Write ``corpus.jsonl``, a file of questions for each split and a manifest; returns the question files.

    Raises:
        ConfigError: The world holds fewer questions than asked for.
    """
    out = Path(out_dir)
    paths = {split: out / f"{split.value}.jsonl" for split in sizes}
    for split, path in paths.items():
        write_tasks(generate(world, split, sizes[split], seed=seed, hops=hops, shapes=shapes), path)
    write_corpus(world, out / "corpus.jsonl", progress)
    counts = {"pages": world.size} | {split.value: count for split, count in sizes.items()}
    write_manifest(
        out / "manifest.json",
        counts=counts,
        seed=seed,
        world=DATA_SOURCE,
        wordings=world.wordings,
        brief=world.brief,
        hops=list(hops),
        shapes=[shape.value for shape in shapes],
    )
    return paths


def _opened(path: Path, compressed: bool) -> IO[str]:
    if compressed:
        return gzip.open(path, "wt", encoding="utf-8", compresslevel=6)
    return path.open("w", encoding="utf-8")
