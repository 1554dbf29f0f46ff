"""A fine-tuning that is killed again and again must end with the same bits as one that was left alone.

    .venv/bin/python benchmarks/kill_sft.py --kills 10 --out kill_sft.json

SIGKILL comes at a random moment after each start, beginning with the imports: while data is prepared, in a step, in the
middle of a checkpoint, or while the model is saved. Weights are compared byte by byte, losses step by step. Exit status 1
when anything differs.
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
WEIGHTS = "model.safetensors"


def prepare(folder: Path) -> None:
    """A tiny model and a data set in ``folder``."""
    from afm.models.tiny import create_tiny_model, train_tokenizer

    outputs = [f"{CALL}\n<observation>\n{n}\n</observation>\n<answer>{n}</answer>" for n in range(256)]
    rows = [{"instruction": f"What is {n}?", "input": "", "output": text} for n, text in enumerate(outputs)]
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    train_tokenizer(outputs, folder / "start", vocab_size=400)
    create_tiny_model(folder / "start", folder / "start", seed=1, hidden_size=64, layers=2, heads=2, mlp=128)


def started(folder: Path, out: Path, steps: int) -> subprocess.Popen[bytes]:
    """A training into ``out``."""
    pairs = {
        "model_name_or_path": folder / "start",
        "dataset_dir": folder,
        "dataset": "rows",
        "output_dir": out,
        "max_steps": steps,
        "save_steps": 25,
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
    """Loss by step, as logged."""
    log = out / "trainer_log.jsonl"
    rows = map(json.loads, log.read_text("utf-8").splitlines()) if log.exists() else iter(())
    return {row["current_steps"]: row["loss"] for row in rows if "loss" in row}


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
        for _ in range(arguments.kills):
            training = started(folder, killed, arguments.steps)
            moment = chance.uniform(0, seconds)
            try:
                status = training.wait(moment)
            except subprocess.TimeoutExpired:
                training.kill()
                status = training.wait()
            moments.append(
                {"after_s": round(moment, 1), "status": status, "step": max(losses(killed), default=0)}
            )
        last = started(folder, killed, arguments.steps).wait()
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
    }
    report(result | same | {"environment": environment(["llamafactory", "torch", "afm"])}, arguments.out)
    if last or not same["same_losses"] or not same["same_weights"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
