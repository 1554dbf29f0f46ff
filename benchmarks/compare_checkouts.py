"""Compare all speed benchmarks in two checkouts, before and after a change.

    git worktree add ../before COMMIT && ln -s "$PWD/.venv" ../before/.venv
    .venv/bin/python benchmarks/compare_checkouts.py ../before . --rounds 5 --out compared.json

A round runs a benchmark in the old checkout and then in the new one, so that a machine that slows down slows both. The
table shows each figure's median in both checkouts, and the median, smallest and largest ratio of new to old. Fewer seconds
are better. A figure counts as slower only if it is slower in every round. Finished rounds are kept in the output file, and
the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timing import environment


@dataclass(frozen=True)
class Benchmark:
    """Options of a script, and the seconds in its result to compare, as label and path of keys."""

    options: Sequence[str]
    seconds: Mapping[str, Sequence[str]]


def medians(*names: str, below: Sequence[str] = ("seconds",)) -> dict[str, Sequence[str]]:
    """Return the paths of the median seconds of these ways."""
    return {name: (*below, name, "median_s") for name in names}


_PIPELINE = {
    f"{work}, {way}": (work, "seconds", way, "median_s")
    for work, way in (("filter", "ours, 1 process"), ("filter", "ours, 2 processes"), ("merge", "ours"))
}

BENCHMARKS = {
    "help": Benchmark(["--runs", "5"], medians("afm --help", "afm rl --help", "afm data distill --help")),
    "parse": Benchmark(
        ["--megabytes", "5", "--runs", "5"],
        medians("parse", "author_segments", "validate", "stream, 16 characters at a time"),
    ),
    "masking": Benchmark(
        ["--rows", "300", "--runs", "3"], medians("ours, split", "ours, mask", "ours, keep")
    ),
    "eval": Benchmark(
        ["--episodes", "500", "--runs", "3", "--rows", "20000"],
        {
            "runner, processor": ("overhead", "processor", "seconds", "afm eval", "median_s"),
            "resume to first episode": ("resume", "to_work_s"),
            "resume, whole call": ("resume", "whole_call_s"),
        },
    ),
    "distill": Benchmark(
        ["--tasks", "500"], {world: ("results", world, "seconds") for world in ("math", "wiki")}
    ),
    "engine": Benchmark(
        ["--runs", "4", "--tokens", "32", "--threads", "1"],
        {
            f"batch {batch}": ("models", "quickstart", "batch", batch, "seconds", "ours", "median_s")
            for batch in ("1", "8", "32", "32 uneven")
        },
    ),
    "rewards": Benchmark(
        ["--pairs", "200", "--cases", "20", "--runs", "3"],
        {
            "math, score_many": ("math", "seconds", "score_many", "median_s"),
            **{
                name: ("code_tests", "seconds", name, "median_s")
                for name in ("evaluation, many cases a run", "training, growing batches")
            },
        },
    ),
    "sandbox": Benchmark(
        ["--backends", "zygote", "bubblewrap", "--concurrency", "8", "--seconds", "3"],
        {
            f"{work}, {backend}, p50 ms": ("results", f"{work}, 8 at a time", backend, "p50_ms")
            for work in ("print", "numpy+sympy")
            for backend in ("zygote", "bubblewrap")
        },
    ),
    "pipeline": Benchmark(["--rows", "3000", "--runs", "2"], _PIPELINE),
    "rollout": Benchmark(["--episodes", "16", "--runs", "2"], medians("ours")),
    "step": Benchmark(["--steps", "8"], {"step": ("seconds", "ours", "step", "median_s")}),
    "wiki": Benchmark(
        ["--passages", "30000", "--queries", "5000", "--seconds", "3"],
        {
            "build": ("build", "bm25", "seconds"),
            "start": ("bm25", "start_s"),
            **{f"p50 ms, {clients} clients": ("bm25", "ours", clients, "p50_ms") for clients in ("1", "32")},
        },
    ),
    "view": Benchmark(
        ["--episodes", "30000", "--runs", "3"],
        {
            "index": ("index", "seconds"),
            "first paint": ("browser", "first_paint_s"),
            "search": ("browser", "search of a word in every episode"),
        },
    ),
}
"""Sizes are small, so that a round takes about 15 minutes. README.md has full sizes."""

WHOLE = "whole script, processor"


def run_once(checkout: Path, name: str) -> dict[str, float]:
    """Return the figures of one run in a checkout; processor seconds include the children of the script.

    Raises:
        SystemExit: The benchmark failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        script = checkout / "benchmarks" / f"bench_{name}.py"
        command = [
            str(checkout / ".venv/bin/python"),
            str(script),
            *BENCHMARKS[name].options,
            "--out",
            str(out),
        ]
        before = os.times()
        run = subprocess.run(
            command,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        after = os.times()
        if not out.exists():
            raise SystemExit(f"{' '.join(command)} ended with {run.returncode}:\n{run.stdout[-2000:]}")
        result = json.loads(out.read_text(encoding="utf-8"))
    figures = {
        label: value
        for label, path in BENCHMARKS[name].seconds.items()
        if (value := number_at(result, path)) is not None
    }
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return {**figures, WHOLE: round(processor, 3)}


def number_at(result: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """Return the number at a path of keys, or ``None`` if the benchmark of this checkout does not report it."""
    value: Any = result
    for key in path:
        if key not in value:
            return None
        value = value[key]
    return float(value)


def table(rounds: Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]]) -> str:
    """Return a Markdown table of all finished rounds."""
    lines = ["| benchmark | figure | old | new | new / old | |", "|---|---|---|---|---|---|"]
    for name, pairs in rounds.items():
        for label in (label for label in pairs[0]["new"] if label in pairs[0]["old"]):
            old, new = ([pair[side][label] for pair in pairs] for side in ("old", "new"))
            ratios = [after / before for before, after in zip(old, new, strict=True)]
            verdict = "slower" if min(ratios) > 1 else "faster" if max(ratios) < 1 else "same"
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            middle = f"{statistics.median(old):.3g} | {statistics.median(new):.3g}"
            lines.append(f"| {name} | {label} | {middle} | {spread} | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="checkout before the change")
    parser.add_argument("new", type=Path, help="checkout after the change")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, required=True, help="file of the finished rounds; read if it exists"
    )
    options = parser.parse_args()
    sides = {"old": options.old.resolve(), "new": options.new.resolve()}
    kept = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"rounds": {}}
    for number in range(options.rounds):
        for name in options.only:
            pairs = kept["rounds"].setdefault(name, [])
            if len(pairs) > number:
                continue
            pairs.append({side: run_once(checkout, name) for side, checkout in sides.items()})
            kept["environment"] = environment(["torch", "transformers", "verl", "llamafactory"])
            options.out.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
            print(f"round {number + 1}: {name}", file=sys.stderr)
    print(table(kept["rounds"]))


if __name__ == "__main__":
    main()
