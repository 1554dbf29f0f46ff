"""Shared code of the speed benchmarks: interleaved timing with median and spread, and a record of the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import afm

REPO = Path(__file__).resolve().parents[1]


def interleaved(candidates: Mapping[str, Callable[[], object]], runs: int) -> dict[str, dict[str, float]]:
    """Measure the seconds of each candidate: one warm-up, then ``runs`` rounds of all candidates.

    All candidates run in each round, so that a machine that slows down slows all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(runs + 1):
        for name, run in candidates.items():
            begun = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - begun)
    return {name: summary(values) for name, values in seconds.items()}


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    named = {"median_s": statistics.median(values), "min_s": min(values), "max_s": max(values)}
    return {name: round(value, 5) for name, value in named.items()}


def environment(packages: Sequence[str]) -> dict[str, Any]:
    """Return hardware, commit and versions."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "clean": _git("status", "--porcelain", "--", "afm", "benchmarks") == "",
        "versions": {name: _version(name) for name in packages},
    }


def report(result: Mapping[str, Any], out: Path | None) -> None:
    """Print a result as JSON, and write it to ``out`` if given."""
    text = json.dumps(result, indent=2)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", "-C", str(REPO), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


def _version(package: str) -> str | None:
    if package == "afm":  # the import name; the distribution has another name
        return afm.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None
