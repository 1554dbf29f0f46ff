"""Run the quickstart for several seeds and print the README's table: quality, time and peak memory.

    .venv/bin/python benchmarks/measure_quickstart.py --seeds 0 1 2 --out runs/measured
    .venv/bin/python benchmarks/measure_quickstart.py --world wiki --seeds 0 1 2 --out runs/measured-wiki
    .venv/bin/python benchmarks/measure_quickstart.py --base smollm2 --seeds 0 1 2 --out runs/measured-base

CPU minutes are those of all processes of the run, on all cores together; a busy machine lengthens only the wall-clock minutes.
Peak memory is the largest sum of proportional set sizes over the whole process tree. It is sampled every 15 s, because
reading it stops the process, for half a second at 8 GB. Finished seeds are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

_MEMORY_EVERY_S = 15.0


class TreeMeter:
    """Memory and CPU time of a process and its descendants, including those that have ended."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cpu_seconds: dict[psutil.Process, float] = {}
        self.peak_bytes = 0
        self._next_memory = 0.0

    def sample(self) -> None:
        """Read the CPU time, and every 15 s the memory, with shared pages counted once."""
        with_memory = time.monotonic() >= self._next_memory
        if with_memory:
            self._next_memory = time.monotonic() + _MEMORY_EVERY_S
        total = 0
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                used = process.cpu_times()
                self._cpu_seconds[process] = used.user + used.system
                if with_memory:
                    total += process.memory_full_info().pss
            except psutil.Error:
                continue
        self.peak_bytes = max(self.peak_bytes, total)

    @property
    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all processes, on all cores together."""
        return sum(self._cpu_seconds.values())


def run_seed(seed: int, out: Path, arguments: list[str]) -> dict[str, Any]:
    """Run one quickstart; return its figures with wall time in seconds and peak memory in bytes."""
    result = out / f"seed{seed}.json"
    if result.exists():
        return dict(json.loads(result.read_text()))
    command = [sys.executable, "-m", "afm.cli.main", "quickstart", "--seed", str(seed)]
    command += ["--output-dir", str(out / f"seed{seed}"), *arguments]
    begun, load = time.monotonic(), os.getloadavg()[0]
    child = subprocess.Popen(command)
    meter = TreeMeter(child.pid)
    while child.poll() is None:
        meter.sample()
        time.sleep(0.5)
    if child.returncode:
        raise SystemExit(f"seed {seed} ended with status {child.returncode}")
    folder = out / f"seed{seed}"
    row: dict[str, Any] = {
        "seed": seed,
        "seconds": round(time.monotonic() - begun, 1),
        "cpu_seconds": round(meter.cpu_seconds, 1),
        "load_before_and_after": [load, os.getloadavg()[2]],
        "peak_bytes": meter.peak_bytes,
        "comparison": comparison(folder),
    }
    for stage in ("eval_sft", "eval_rl"):
        row[stage] = json.loads((folder / stage / "metrics.json").read_text())
    result.write_text(json.dumps(row, indent=2) + "\n")
    return row


def comparison(folder: Path) -> dict[str, float]:
    """Return the paired difference in pass@1, RL minus SFT, with its 95 % interval."""
    from afm.evaluation import paired_difference
    from afm.trajectory.io import load_records

    before = load_records(folder / "eval_sft/episodes.jsonl")
    after = load_records(folder / "eval_rl/episodes.jsonl")
    difference = paired_difference(before, after).difference
    return {"value": difference.value, "low": difference.low, "high": difference.high}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/measured"))
    parser.add_argument("--world", choices=("math", "wiki"), default="math")
    parser.add_argument("--base", help="pre-trained model, as in the quickstart")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    arguments = ["--world", options.world, *(["--smoke"] if options.smoke else [])]
    arguments += ["--base", options.base] if options.base else []
    rows = [run_seed(seed, options.out, arguments) for seed in options.seeds]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    summary = {
        "world": options.world,
        "base": options.base,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {psutil.virtual_memory().total >> 30} GiB",
        "commit": commit.stdout.strip(),
        "versions": {name: version(name) for name in ("torch", "transformers", "verl", "llamafactory")},
        "runs": rows,
    }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary["machine"]), summary["commit"])
    print(
        "| seed | SFT pass@1 | RL pass@1 | paired difference (95 %) | format after RL | tool calls | minutes | CPU minutes "
        "| peak GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(table_row(row))


def table_row(row: dict[str, Any]) -> str:
    """Return a line of the Markdown table."""
    sft, rl, paired = row["eval_sft"], row["eval_rl"], row["comparison"]
    return (
        f"| {row['seed']} | {sft['pass_at_1']['value']:.3f} | {rl['pass_at_1']['value']:.3f} "
        f"| {paired['value']:+.3f} ({paired['low']:.3f} to {paired['high']:.3f}) | {rl['format_valid']:.3f} "
        f"| {sft['tool_calls']:.2f} -> {rl['tool_calls']:.2f} "
        f"| {row['seconds'] / 60:.1f} | {row['cpu_seconds'] / 60:.1f} | {row['peak_bytes'] / 2**30:.1f} |"
    )


if __name__ == "__main__":
    main()
