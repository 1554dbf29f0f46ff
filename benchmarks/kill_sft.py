"""Check that a fine-tuning that is killed repeatedly ends with the same bits as an undisturbed one.

    .venv/bin/python benchmarks/kill_sft.py --kills 10 --out kill_sft.json

Each start gets SIGKILL at a random moment. The moments alternate between any second (including imports), up to 50 ms after a
step with a checkpoint, and any step. The report counts the incomplete checkpoints. Weights are compared byte by byte, losses
step by step. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from timing import environment, report

CONFIG = Path(__file__).resolve().parent.parent / "configs/tiny/sft/math.yaml"
CALL = "<think>Use the tool.</think><code>print(17+25)</code>"
SAVE_STEPS = 25
WEIGHTS = "model.safetensors"


def prepare(folder: Path) -> None:
    """Write a tiny model and a data set to ``folder``."""
    from afm.models.tiny import create_tiny_model, train_tokenizer

    outputs = [f"{CALL}\n<observation>\n{n}\n</observation>\n<answer>{n}</answer>" for n in range(256)]
    rows = [{"instruction": f"What is {n}?", "input": "", "output": text} for n, text in enumerate(outputs)]
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    train_tokenizer(outputs, folder / "start", vocab_size=400)
    create_tiny_model(folder / "start", folder / "start", seed=1, hidden_size=64, layers=2, heads=2, mlp=128)


def started(folder: Path, out: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start a run into ``out``."""
    pairs = {
        "model_name_or_path": folder / "start",
        "dataset_dir": folder,
        "dataset": "rows",
        "output_dir": out,
        "max_steps": steps,
        "save_steps": SAVE_STEPS,
        "save_total_limit": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "cutoff_len": 256,
        "threads": 1,
    }
    words = [f"{key}={value}" for key, value in pairs.items()]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "llamafactory_patch.launcher", str(CONFIG), *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def losses(out: Path) -> dict[int, float]:
    """Return the logged loss by step; ignore an incomplete line."""
    log = out / "trainer_log.jsonl"
    text = log.read_text("utf-8") if log.exists() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {row["current_steps"]: row["loss"] for row in rows if "loss" in row}


def last_step(out: Path) -> int:
    """Return the last logged step."""
    return max(losses(out), default=0)


def kill(
    training: subprocess.Popen[bytes], out: Path, *, after_s: float | None, at_step: int, pause_s: float
) -> dict[str, Any]:
    """Kill a run at a moment, or as soon as a step is logged; return what it left."""
    began = time.perf_counter()
    while training.poll() is None:
        waited = time.perf_counter() - began
        if waited >= after_s if after_s is not None else last_step(out) >= at_step:
            time.sleep(pause_s)
            training.kill()
        time.sleep(0.002)
    seconds = round(time.perf_counter() - began, 1)
    return {"after_s": seconds, "status": training.wait(), "step": last_step(out)}


def main() -> None:
    """Train undisturbed, then with kills, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        whole, killed = folder / "whole", folder / "killed"
        began = time.perf_counter()
        if started(folder, whole, arguments.steps).wait():
            raise SystemExit(f"the undisturbed training failed: see {whole}/training.log")
        seconds = time.perf_counter() - began
        moments = []
        for number in range(1, arguments.kills + 1):
            moment = chance.uniform(0, seconds / 3) if number % 3 == 1 else None
            left = arguments.steps - last_step(killed)
            step = (
                arguments.steps - left + chance.randint(1, max(1, 2 * left // (arguments.kills - number + 1)))
            )
            step = min(step, arguments.steps)
            saving = number % 3 == 2
            if saving:
                step += -step % SAVE_STEPS
            pause = chance.uniform(0, 0.05) if saving else 0.0
            training = started(folder, killed, arguments.steps)
            moments.append(kill(training, killed, after_s=moment, at_step=step, pause_s=pause))
        last = started(folder, killed, arguments.steps).wait()
        half_written = len(list(killed.glob("incomplete-checkpoint-*")))
        same: dict[str, Any] = {
            "exit_status": last,
            "same_losses": losses(whole) == losses(killed) and len(losses(whole)) == arguments.steps,
            "same_weights": (whole / WEIGHTS).read_bytes() == (killed / WEIGHTS).read_bytes(),
        }
    result = {
        "benchmark": "kill_sft",
        "steps": arguments.steps,
        "undisturbed_s": round(seconds, 1),
        "kills": moments,
        "half_written_checkpoints": half_written,
    }
    report(result | same | {"environment": environment(["llamafactory", "torch", "afm"])}, arguments.out)
    if last or not same["same_losses"] or not same["same_weights"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
