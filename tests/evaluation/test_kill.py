"""A real process, killed in the middle of an evaluation."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("scripted_solver.py")
TASKS = 16

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]


def start(output_dir, pause_s):
    command = [sys.executable, str(SCRIPT), str(output_dir), str(TASKS), str(pause_s), "4"]
    # A session of its own, so that the kill takes the reward's workers and the sandboxes along.
    return subprocess.Popen(command, start_new_session=True)


def test_killed_at_any_moment_the_run_continues_and_ends_like_an_undisturbed_one(tmp_path, solver) -> None:
    def rows(folder):
        """Whole lines by id, without the times."""
        file = folder / "episodes.jsonl"
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        whole = [solver.timeless(json.loads(line)) for line in lines if line.endswith(b"\n")]
        by_id = {row["id"]: row for row in whole}
        assert len(by_id) == len(whole)
        return by_id

    assert start(tmp_path / "whole", 0.0).wait(timeout=120) == 0
    cut = tmp_path / "cut"
    rng = random.Random(5)
    progress = []
    for goal in sorted(rng.sample(range(1, TASKS - 4), 2)):
        process = start(cut, 0.15)
        while len(rows(cut)) < goal and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
        progress.append(rows(cut))
        assert not (cut / "metrics.json").exists()
    assert start(cut, 0.0).wait(timeout=120) == 0
    final = rows(cut)
    for earlier in progress:
        assert earlier.items() <= final.items()
    assert 0 < len(progress[0]) < TASKS
    assert final == rows(tmp_path / "whole")
    assert len(final) == TASKS
    metrics = [json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("whole", "cut")]
    for one in metrics:
        one.pop("seconds")
    assert metrics[0] == metrics[1]
