"""Measure the time to print a help text, for `afm --help` and commands, against the smallest Typer program.

    .venv/bin/python benchmarks/bench_help.py --out help.json

The rival in the same run is a program with one Typer command and none of our modules: the cost of Python, Typer and Rich.
The limit is half a second. Processor seconds are reported too, because other work on the machine hardly changes them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from timing import environment, interleaved, report, summary

COMMANDS = ("--help", "rl --help", "eval run --help", "data distill --help", "mask --help", "doctor --help")
SMALLEST = """
import typer
app = typer.Typer()
@app.command()
def program(number: int = 1) -> None:
    "Does nothing."
app(["--help"])
"""


def timed(words: list[str], processor: list[float]) -> Callable[[], None]:
    """Return a function that runs a program and appends its processor seconds to the list."""

    def call() -> None:
        before = os.times()
        subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
        after = os.times()
        processor.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )

    return call


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="one run of the first command")
    options = parser.parse_args()
    shown = COMMANDS[:1] if options.smoke else COMMANDS
    programs = {f"afm {words}": ["-m", "afm.cli.main", *words.split()] for words in shown}
    programs["typer alone"] = ["-c", SMALLEST]
    processor: dict[str, list[float]] = {name: [] for name in programs}
    calls = {name: timed(words, processor[name]) for name, words in programs.items()}
    seconds = interleaved(calls, 1 if options.smoke else options.runs)
    result = {
        "seconds": seconds,
        "processor": {name: summary(values[1:]) for name, values in processor.items()},
        "environment": environment(["typer", "rich", "pydantic"]),
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
