"""Seconds of an episode of each example program, started for each episode and forked (`harness.preload`).

    PYTHON benchmarks/bench_programs.py script langgraph --episodes 32 --out programs.json

PYTHON is a virtual environment with this project and `requirements/frameworks.txt`. A scripted model answers at once, so
the time is that of the programs, of their clients and of the gateway. A first episode is not counted. The processor time
is that of all processes of the programs. It contains their first start and the imports of the process that forks.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from harness_gain import HARNESSES, _sessions, _tokenizer
from timing import environment, report

from afm.datasets import Task
from afm.harness.episode import HarnessRunner
from afm.models.base import ScriptedModel
from afm.models.tiny import train_tokenizer
from afm.models.tokenizer import ChatTokenizer

QUESTION, EXPRESSION, ANSWER = "Tom has 57 coins. Tom finds 38 more. How many coins has Tom?", "57+38", "95"


async def measure(name: str, preload: bool, episodes: int, codec: ChatTokenizer) -> dict[str, float]:
    """Return seconds and processor seconds per episode.

    Raises:
        SystemExit: An answer is wrong.
    """
    harness = HARNESSES[name]

    def reply(text: str) -> str:
        observed = ANSWER in text.rpartition("<|im_start|>user\n")[2]
        return (
            harness.answer.replace("%s", ANSWER)
            if observed
            else harness.calculation.replace("%s", EXPRESSION)
        )

    model = ScriptedModel(reply, codec, name="scripted")
    runner = HarnessRunner(harness.settings.model_copy(update={"preload": preload}))
    tasks = [Task(id=f"q{number}", question=QUESTION, ground_truth=ANSWER) for number in range(episodes + 1)]
    before = cpu_seconds()
    try:
        first = await runner.play(tasks[0], [], _sessions(model, codec), 0)
        begun = time.perf_counter()
        rest = await asyncio.gather(
            *(runner.play(task, [], _sessions(model, codec), 0) for task in tasks[1:])
        )
        seconds = time.perf_counter() - begun
    finally:
        await runner.close()
    if wrong := [episode for episode in (first, *rest) if episode.answer != ANSWER]:
        raise SystemExit(f"{name}: {len(wrong)} episodes failed: {wrong[0].failure or wrong[0].answer}")
    return {"seconds": seconds / episodes, "cpu_seconds": (cpu_seconds() - before) / episodes}


def cpu_seconds() -> float:
    """Processor seconds of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("harnesses", nargs="+", choices=list(HARNESSES), metavar="HARNESS")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = {}
    with TemporaryDirectory() as folder:
        train_tokenizer(["Tom has 12 apples."], Path(folder), vocab_size=300)
        codec = _tokenizer(Path(folder))
        for name in given.harnesses:
            started, forked = (
                asyncio.run(measure(name, preload, given.episodes, codec)) for preload in (False, True)
            )
            times = {key: round(started[key] / forked[key], 2) for key in started}
            rows[name] = {"started": started, "forked": forked, "times_started": times}
    result = {"benchmark": "programs", "episodes": given.episodes, "concurrency": 8, "programs": rows}
    report(result | {"load": os.getloadavg()[0], "environment": environment([])}, given.out)


if __name__ == "__main__":
    main()
