"""Check that an evaluation that is killed repeatedly ends with the metrics of an undisturbed one.

    .venv/bin/python benchmarks/kill_eval.py --kills 10 --out kill_eval.json

Runs the scripted solver of the tests with the real code tool, sandbox and reward workers in a separate process. Each start
gets SIGKILL for the whole process group at a random moment, from the imports until after the last episode. In half of the
kills, the end of ``episodes.jsonl`` is also cut off, as after a power failure. All episodes and metrics.json, without times,
are compared with the undisturbed run. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from timing import environment, report

SOLVER = Path(__file__).resolve().parents[1] / "tests/shared/scripted_solver.py"
PAUSE_S = 0.05
PARALLEL = 4
MOST_TORN_BYTES = 400


def started(out: Path, tasks: int) -> subprocess.Popen[bytes]:
    """Start an evaluation into ``out`` in its own session, so that its workers and sandboxes are killed with it."""
    command = [sys.executable, str(SOLVER), str(out), str(tasks), str(PAUSE_S), str(PARALLEL)]
    return subprocess.Popen(command, start_new_session=True)


def rows(out: Path) -> dict[str, Any]:
    """Return episodes by id, without times; fail if an id occurs twice."""
    found: dict[str, Any] = {}
    for line in (out / "episodes.jsonl").read_bytes().splitlines():
        row = json.loads(line)
        if row["id"] in found:
            raise SystemExit(f"{out}: episode {row['id']} occurs twice")
        found[row["id"]] = _timeless(row)
    return found


def metrics(out: Path) -> Any:
    """Return metrics.json without times."""
    return _timeless(json.loads((out / "metrics.json").read_text(encoding="utf-8")))


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if not key.endswith("seconds")}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


def torn(out: Path, draw: random.Random) -> str:
    """Cut off the end of the episodes; return the name of the file."""
    file = out / "episodes.jsonl"
    if not file.exists():
        return "nothing"
    os.truncate(file, max(0, file.stat().st_size - draw.randrange(MOST_TORN_BYTES)))
    return file.name


def killed(out: Path, tasks: int, kills: int, whole_s: float, draw: random.Random) -> list[dict[str, Any]]:
    """Start and kill ``kills`` times; return what each start left."""
    reports = []
    for number in range(kills):
        process = started(out, tasks)
        after_s = draw.uniform(0.0, whole_s)
        time.sleep(after_s)
        ended = process.poll() is not None
        if not ended:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        cut = torn(out, draw) if number % 2 and not ended else "nothing"
        file = out / "episodes.jsonl"
        lines = file.read_bytes().count(b"\n") if file.exists() else 0
        reports.append({"after_s": round(after_s, 2), "had_ended": ended, "torn": cut, "episodes": lines})
        print(reports[-1], file=sys.stderr, flush=True)
    return reports


def main() -> int:
    """Run and compare; return 1 if a killed run ends differently."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill_eval") as name:
        whole, cut = Path(name) / "whole", Path(name) / "cut"
        begun = time.monotonic()
        if started(whole, given.tasks).wait():
            raise SystemExit("the undisturbed run failed")
        whole_s = time.monotonic() - begun
        reports = killed(cut, given.tasks, given.kills, whole_s / 2, random.Random(given.seed))
        if started(cut, given.tasks).wait():
            raise SystemExit("the last start failed")
        same_rows, same_metrics = rows(cut) == rows(whole), metrics(cut) == metrics(whole)
    found = {
        "environment": environment(["pydantic", "httpx"]),
        "undisturbed_s": round(whole_s, 1),
        "kills": reports,
        "episodes": given.tasks,
        "equal_episodes": same_rows,
        "equal_metrics": same_metrics,
    }
    report(found, given.out)
    return 0 if same_rows and same_metrics else 1


if __name__ == "__main__":
    sys.exit(main())
