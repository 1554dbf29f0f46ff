"""Compare the sandboxes: latency, throughput, and the savings of a warm Python.

Usage: python benchmarks/bench_sandbox.py [--backends zygote bubblewrap] [--seconds 5] [--concurrency 1 8 64] [--out FILE]

Every program's output is checked. Backends alternate in short rounds, so that a machine that slows down slows all of
them. Programs that import numpy and sympy need them in the sandbox's Python: `afm sandbox install`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timing import environment, report

from afm.errors import SandboxUnavailableError
from afm.sandbox import open_sandbox
from afm.sandbox.base import LocalSandbox

PROGRAMS = {
    "print": ("print(1 + 1)", "2\n"),
    "numpy+sympy": (
        "import numpy, sympy\nprint(numpy.arange(5).sum(), sympy.expand((sympy.Symbol('x') + 1) ** 2))",
        "10 x**2 + 2*x + 1\n",
    ),
}
ROUNDS = 5


async def measured(
    sandbox: LocalSandbox, program: str, expected: str, concurrency: int, seconds: float
) -> list[float]:
    """Return the seconds from call to result of each run that began within ``seconds``."""
    latencies: list[float] = []
    over = time.perf_counter() + seconds

    async def caller() -> None:
        while (begun := time.perf_counter()) < over:
            result = await sandbox.run(program)
            assert result.stdout == expected, result
            latencies.append(time.perf_counter() - begun)

    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return latencies


async def compare(
    sandboxes: dict[str, LocalSandbox], concurrency: int, name: str, seconds: float
) -> dict[str, Any]:
    """Measure a program at one concurrency in all sandboxes, which alternate."""
    program, expected = PROGRAMS[name]
    latencies: dict[str, list[float]] = {backend: [] for backend in sandboxes}
    rates: dict[str, list[float]] = {backend: [] for backend in sandboxes}
    for _ in range(ROUNDS):
        for backend, sandbox in sandboxes.items():
            begun = time.perf_counter()
            seen = await measured(sandbox, program, expected, concurrency, seconds / ROUNDS)
            rates[backend].append(len(seen) / (time.perf_counter() - begun))
            latencies[backend] += seen
    return {
        backend: {
            "runs": len(latencies[backend]),
            "runs_per_s": round(statistics.median(rates[backend]), 1),
            "runs_per_s_spread": [round(min(rates[backend]), 1), round(max(rates[backend]), 1)],
            "p50_ms": round(percentile(latencies[backend], 50), 2),
            "p99_ms": round(percentile(latencies[backend], 99), 2),
        }
        for backend in sandboxes
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile in milliseconds: the nearest value at or above ``percent`` of all."""
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


async def opened(backends: Sequence[str], cores: int | None = None) -> dict[str, LocalSandbox]:
    """Open the sandboxes that work here, with warm zygotes."""
    working = {}
    for backend in backends:
        sandbox = open_sandbox(backend, max_parallel=cores)
        try:
            print(backend, *await sandbox.isolation(), sep="\n  ")
        except SandboxUnavailableError as error:
            print(f"{backend}: skipped, {error}")
            continue
        for program, expected in PROGRAMS.values():
            result = await sandbox.run(program)
            if result.stdout != expected:
                raise SystemExit(f"{backend}: {result.stderr}\nrun `afm sandbox install` first")
            await measured(sandbox, program, expected, cores or os.cpu_count() or 1, 0.5)
        working[backend] = sandbox
    return working


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements."""
    sandboxes = await opened(options.backends)
    results: dict[str, Any] = {}
    for name in PROGRAMS:
        for concurrency in options.concurrency:
            row = await compare(sandboxes, concurrency, name, options.seconds)
            results[f"{name}, {concurrency} at a time"] = row
            first = row[options.backends[0]]["runs_per_s"]
            row["ratios"] = {b: round(first / row[b]["runs_per_s"], 2) for b in list(sandboxes)[1:]}
            show(f"{name}, {concurrency} at a time", row)
    for sandbox in sandboxes.values():
        await sandbox.close()
    results["scaling"] = await scaling(options.backends[0], options.seconds)
    return results


def show(title: str, row: dict[str, Any]) -> None:
    """Print a line per backend."""
    print(f"\n{title}")
    for backend, values in row.items():
        if backend == "ratios":
            print("  " + ", ".join(f"{value} x {rival}" for rival, value in values.items()))
        else:
            print(
                f"  {backend:11} {values['runs_per_s']:8} runs/s   p50 {values['p50_ms']:8} ms   p99 {values['p99_ms']:8} ms"
            )


async def scaling(backend: str, seconds: float) -> dict[str, Any]:
    """Return the throughput with one parallel run, two, four, and up to one per core."""
    rates = {}
    cores = 1
    while cores <= len(os.sched_getaffinity(0)):
        sandboxes = await opened([backend], cores)
        for name, (program, expected) in PROGRAMS.items():
            begun = time.perf_counter()
            seen = await measured(sandboxes[backend], program, expected, 4 * cores, seconds)
            rates[f"{name}, {cores} parallel"] = round(len(seen) / (time.perf_counter() - begun), 1)
        await sandboxes[backend].close()
        cores *= 2
    print("\nscaling (runs/s)", rates)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", default=["zygote", "bubblewrap", "nsjail"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="seconds per backend, program and concurrency"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = asyncio.run(run(options))
    report({"environment": environment(["numpy", "sympy"]), "results": result}, options.out)


if __name__ == "__main__":
    main()
