"""Measure trajectories per second of the scripted wiki and math teams, with real tool calls.

    .venv/bin/python benchmarks/bench_distill.py --tasks 20000 --out distill.json

Runs the user's command, `afm data distill`, in a separate process: start, team, merge, filters and writing together. The
wiki's tool is a BM25 server over HTTP, the math tool is the sandbox. Before reporting, the benchmark checks the files:
every task is in exactly one of them, and every kept trajectory ends with the answer of its task.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from timing import environment, report

from afm.cli.recipes import wiki_server
from afm.datasets import write_tasks
from afm.datasets.encyclopaedia import Encyclopaedia, write_encyclopaedia
from afm.datasets.mini_world import WorldSplit, generate

CONFIGS = Path(__file__).parents[1] / "configs"
PAGES = 40_000


def wiki_world(folder: Path, tasks: int) -> None:
    """Write questions of one and two hops, and the index of the pages that answer them."""
    world = Encyclopaedia(PAGES, seed=0)
    write_encyclopaedia(folder, world, sizes={WorldSplit.TRAIN: tasks}, seed=0, hops=[1, 2])
    words = [sys.executable, "-m", "tool_servers.wiki_search.build", str(folder / "corpus.jsonl")]
    subprocess.run([*words, f"--output-dir={folder / 'index'}"], check=True, capture_output=True)


def distilled(tasks: Path, out: Path, agent: Path, tools: Path, parallel: int) -> dict[str, float]:
    """Run the command once; return its figures."""
    words = [sys.executable, "-m", "afm.cli.main", "data", "distill", str(tasks), f"--output-dir={out}"]
    words += [f"--agent={agent}", f"--tools={tools}", f"--max-parallel={parallel}"]
    started = time.perf_counter()
    subprocess.run(words, check=True)
    seconds = time.perf_counter() - started
    kept, calls = checked(tasks, out)
    count = sum(1 for _ in tasks.open())
    return {
        "tasks": count,
        "kept": kept,
        "tool_calls": calls,
        "seconds": round(seconds, 1),
        "trajectories_per_s": round(count / seconds, 1),
        "minutes_for_20000": round(20_000 * seconds / count / 60, 2),
    }


def checked(tasks: Path, out: Path) -> tuple[int, int]:
    """Return the number of kept trajectories and of their tool calls; fail if a task is lost, doubled or wrong."""
    wanted = Counter(json.loads(line)["id"] for line in tasks.open())
    found: Counter[str] = Counter()
    kept = calls = 0
    for name in ("trajectories.jsonl", "dropped.jsonl"):
        for line in (out / name).open():
            row = json.loads(line)
            found[row["id"]] += 1
            calls += row["cost"]["tool_calls"]
            if row["kept"]:
                kept += 1
                last = row["segments"][-1]["text"]
                assert row["ground_truth"] in last.rpartition("<answer>")[2], row["id"]
    assert found == wanted, "a task was lost or doubled"
    return kept, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", type=int, default=2_000)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(generate(WorldSplit.TRAIN, options.tasks, seed=0), folder / "math.jsonl")
        results["math"] = distilled(
            folder / "math.jsonl",
            folder / "math",
            CONFIGS / "tiny/agents/math.yaml",
            CONFIGS / "tiny/tools/code_executor.yaml",
            options.parallel,
        )
        wiki_world(folder / "world", options.tasks)
        with wiki_server(folder / "world/index", folder / "server.log"):
            results["wiki"] = distilled(
                folder / "world/train.jsonl",
                folder / "wiki",
                CONFIGS / "tiny/agents/mhqa.yaml",
                CONFIGS / "tiny/tools/wiki_rag.yaml",
                options.parallel,
            )
    report({"results": results, "environment": environment(["bm25s", "httpx", "pydantic"])}, options.out)


if __name__ == "__main__":
    main()
