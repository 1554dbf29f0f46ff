"""Measure the wiki server: build, start, memory, recall of gold pages, and queries per second by engine and concurrency.

    .venv/bin/python benchmarks/bench_wiki.py --passages 1000000 --out wiki.json
    .venv/bin/python benchmarks/bench_wiki.py --passages 2000 --model MINILM_FOLDER --out dense.json

The rival in the same run is a plain server that answers one request at a time with the same index. It uses bm25s for BM25,
and our engine for the others. The first 199,000 queries are distinct. Clients share the machine with the server. With
``--model``, the dense and the hybrid engine are measured too, with a flat index, IVF and HNSW.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from timing import REPO, environment, report
from wiki_load import measure, post

from afm.datasets.encyclopaedia import Encyclopaedia, generate, write_corpus
from afm.datasets.mini_world import WorldSplit

CONCURRENCY = (1, 32, 128)
RIVAL = Path(__file__).with_name("wiki_rival.py")


@dataclass(frozen=True)
class Asked:
    """A query for one fact of a gold path, and the passage with this fact."""

    query: str
    passage: str


def queries(world: Encyclopaedia, count: int) -> list[Asked]:
    """Generate a distinct query per gold hop, as a good agent would write it."""
    found: dict[str, str] = {}
    tasks = generate(world, WorldSplit.RL, world.size * 10, seed=7)
    while len(found) < count:
        for hop in next(tasks).extra_info["path"]:
            found.setdefault(f"{hop['asks'].removesuffix(' of whom')} of {hop['title']}", hop["passage"])
    return [Asked(query, passage) for query, passage in list(found.items())[:count]]


def build(corpus: Path, out: Path, *options: str) -> dict[str, float]:
    """Build an index as a user would; return seconds and peak memory."""
    command = [
        sys.executable,
        "-m",
        "tool_servers.wiki_search.build",
        str(corpus),
        "--output-dir",
        str(out),
        *options,
    ]
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=REPO, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit("the build failed")
    return {"seconds": round(time.perf_counter() - began, 1), "peak_mib": round(usage.ru_maxrss / 1024)}


class Running:
    """A server process that has answered its first query; stops at the end of the ``with`` block."""

    def __init__(self, command: Sequence[str]) -> None:
        began = time.perf_counter()
        self._process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline().rpartition(":")[2])
        post(self.port, ["the first query"], 3)
        self.start_s = round(time.perf_counter() - began, 2)

    def memory_mib(self) -> dict[str, float]:
        """Return the resident memory, and the part that is not mapped from files."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8").splitlines()
        sizes = {
            line.split(":")[0]: int(line.split()[1]) / 1024
            for line in lines
            if line.startswith(("VmRSS", "RssAnon"))
        }
        return {"resident": round(sizes["VmRSS"], 1), "own": round(sizes["RssAnon"], 1)}

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def loaded(server: Running, fresh: Iterator[Asked], seconds: float) -> dict[str, Any]:
    """Return the speed at each concurrency."""
    return {
        str(clients): measure(server.port, (item.query for item in fresh), clients, seconds)
        for clients in CONCURRENCY
    }


def recall(server: Running, asked: Sequence[Asked]) -> dict[str, float]:
    """Return how often the gold passage is first, and among the first three."""
    first = among = 0
    for begin in range(0, len(asked), 100):
        part = asked[begin : begin + 100]
        for item, passages in zip(part, post(server.port, [item.query for item in part], 3), strict=True):
            found = [passage["document"]["id"] for passage in passages]
            first += found[:1] == [item.passage]
            among += item.passage in found
    return {"queries": len(asked), "at_1": round(first / len(asked), 4), "at_3": round(among / len(asked), 4)}


def one_engine(index: Path, engine: str, asked: list[Asked], seconds: float) -> dict[str, Any]:
    """Measure our server and then its rival, each with new queries."""
    size = sum(path.stat().st_size for path in index.rglob("*") if path.is_file())
    sample, rest = asked[:1000], cycle(asked[1000:])
    texts = [item.query for item in sample[:50]]
    command = [sys.executable, "-m", "tool_servers", "wiki_search", "--index", str(index), "--engine", engine]
    with Running([*command, "--port", "0"]) as ours:
        result: dict[str, Any] = {"index_mib": round(size / 2**20, 1), "start_s": ours.start_s}
        result["recall"] = recall(ours, sample)
        expected = post(ours.port, texts, 3)
        result["ours"] = loaded(ours, rest, seconds)
        result["memory_mib"] = ours.memory_mib()
    result["memory_by_index"] = round(result["memory_mib"]["resident"] / result["index_mib"], 2)
    with Running([sys.executable, str(RIVAL), str(index), engine]) as rival:
        if not same(expected, post(rival.port, texts, 3)):
            raise SystemExit(f"{engine}: ours and the rival do not agree")
        result["rival"] = loaded(rival, rest, seconds)
    return result


def same(ours: list[Any], theirs: list[Any]) -> bool:
    """Return whether two servers gave the same scores."""
    return all(
        abs(a["score"] - b["score"]) < 1e-3 * max(1.0, abs(a["score"]))
        for one, two in zip(ours, theirs, strict=True)
        for a, b in zip(one, two, strict=True)
    )


def other_faiss(flat: Path, corpus: Path, model: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Build IVF and HNSW indexes from the vectors of a flat one."""
    import faiss

    from tool_servers.wiki_search.dense import build_faiss

    index = faiss.read_index(str(flat / "dense/index.faiss"))
    vectors = folder / "vectors.bin"
    index.reconstruct_n(0, index.ntotal).tofile(vectors)
    for kind in ("ivf", "hnsw"):
        made, out = folder / f"made {kind}", folder / kind
        made.mkdir()
        build_faiss(vectors, index.d, kind, made, lambda *_: None)
        build(corpus, out, "--engine", "dense", "--model", model, "--faiss", str(made / "dense/index.faiss"))
        yield kind, out


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all measurements in ``folder``."""
    world = Encyclopaedia(arguments.passages, seed=arguments.seed, wordings=2)
    corpus, index = folder / "corpus.jsonl", folder / "index"
    began = time.perf_counter()
    write_corpus(world, corpus)
    result: dict[str, Any] = {
        "benchmark": "wiki",
        "passages": world.size,
        "corpus_mib": round(corpus.stat().st_size / 2**20, 1),
        "corpus_s": round(time.perf_counter() - began, 1),
        "build": {"bm25": build(corpus, index)},
    }
    asked = queries(world, min(arguments.queries, 2 * world.size))
    result["bm25"] = one_engine(index, "bm25", asked, arguments.seconds)
    if arguments.model:
        options = ("--engine", "dense", "--model", arguments.model)
        result["build"]["dense flat"] = build(corpus, index, *options)
        for engine in ("dense", "hybrid"):
            result[engine] = one_engine(index, engine, asked, arguments.seconds)
        for kind, other in other_faiss(index, corpus, arguments.model, folder):
            result[f"dense {kind}"] = one_engine(other, "dense", asked, arguments.seconds)
    result["environment"] = environment(
        ["afm", "bm25s", "faiss-cpu", "numpy", "sentence-transformers", "uvicorn"]
    )
    return result


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=200_000)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="seconds of load per server and concurrency"
    )
    parser.add_argument("--model", help="sentence-transformers model, for the dense and hybrid engines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--smoke", action="store_true", help="a small world and a short run, only to see that it works"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder for the corpus and indexes (default: a temporary one)"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.passages, arguments.queries, arguments.seconds = 2_000, 6_000, 0.3
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        shutil.rmtree(folder / "index", ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        result = run(arguments, folder)
    report(json.loads(json.dumps(result)), arguments.out)


if __name__ == "__main__":
    main()
