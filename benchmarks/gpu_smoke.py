"""The steps of gpu_smoke.sh: each runs user commands in its own folder, checks them, and stores its figures.

The task is the starter of ``afm init``, whose tiny model needs no download. A step that passed leaves ``steps/NAME.json``.
A step whose packages are missing is skipped and reported. Exit status 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 480
STEPS_RL = 6
SAVE_EVERY = 2
Figures = dict[str, Any]

MODEL = """
from afm.models.tiny import create_tiny_model
print(create_tiny_model("runs/start", "runs/start", hidden_size=256, layers=4, heads=4, mlp=768))
"""
"""Heads have 64 dimensions, which every attention kernel supports."""
VERSIONS = """
import json
from importlib.metadata import version
import torch
names = ("torch", "transformers", "llamafactory", "deepspeed", "verl", "vllm", "flash-attn", "ray")
found = {}
for name in names:
    try:
        found[name] = version(name)
    except Exception:
        pass
gpu = torch.cuda.is_available()
print(json.dumps({"gpu": torch.cuda.get_device_name() if gpu else None, "cuda": torch.version.cuda, "versions": found}))
"""
LOGPROBS = """
import asyncio, json, torch
from transformers import AutoModelForCausalLM
from afm.models.batch import score_tokens
from afm.trajectory import read_records

rows = [record for record in read_records("runs/eval_sft/episodes.jsonl")][:64]
tokens = [[*row.prompt_ids, *row.response_ids] for row in rows]
def scores(device, dtype):
    model = AutoModelForCausalLM.from_pretrained("runs/sft", dtype=dtype, attn_implementation="sdpa").eval().to(device)
    with torch.inference_mode():
        return [score for ids in tokens for score in score_tokens(model, ids)]
reference = scores("cpu", torch.float32)
device = "cuda" if torch.cuda.is_available() else "cpu"
def gap(others):
    return max(abs(a - b) for a, b in zip(reference, others, strict=True))
print(json.dumps({"tokens": len(reference), "float32": gap(scores(device, torch.float32)), "bfloat16": gap(scores(device, torch.bfloat16))}))
"""


class SkipError(Exception):
    """A step cannot run here; the message has the reason."""


class FailureError(Exception):
    """A step ran and failed a check."""


@dataclass(frozen=True)
class Place:
    """Where the steps run."""

    folder: Path
    sft_venv: Path
    rl_venv: Path
    cpu: bool

    @property
    def task(self) -> Path:
        """The starter's folder."""
        return self.folder / "task"

    def afm(self, venv: Path, *words: str) -> str:
        """Run an ``afm`` command in the task's folder; return and log its output.

        Raises:
            SkipError: The environment is missing.
            FailureError: The command failed or took too long.
        """
        return self.run([self.python(venv), "-m", "afm.cli.main", *words])

    def python(self, venv: Path) -> str:
        """Return the interpreter of an environment."""
        python = venv / "bin/python"
        if not python.exists():
            raise SkipError(f"{venv} is missing")
        return str(python.absolute())

    def needs(self, venv: Path, package: str) -> None:
        """Skip the step if a package is missing."""
        words = [
            self.python(venv),
            "-c",
            f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)",
        ]
        if subprocess.run(words, check=False).returncode:
            raise SkipError(f"{package} is not in {venv}")

    def run(self, words: list[str]) -> str:
        """Run any command, like :meth:`afm`."""
        with (self.folder / "smoke.log").open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(words)}\n")
            try:
                done = subprocess.run(
                    words,
                    cwd=self.task,
                    env=environment(),
                    capture_output=True,
                    text=True,
                    timeout=LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise FailureError(
                    f"not done after {LIMIT_S} s; run the same command again to continue"
                ) from None
            log.write(done.stdout + done.stderr)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-3:]
            raise FailureError(f"exit status {done.returncode}: {' / '.join(last)}")
        return done.stdout


def environment() -> dict[str, str]:
    """Return the environment of the commands, which use this checkout."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def machine(place: Place) -> Figures:
    """Check that both environments import torch and see the GPU."""
    figures = {}
    for name, venv in (("sft", place.sft_venv), ("rl", place.rl_venv)):
        if (venv / "bin/python").exists():
            figures[name] = json.loads(place.run([place.python(venv), "-c", VERSIONS]))
    if not place.cpu and not any(facts["gpu"] for facts in figures.values()):
        raise FailureError("torch sees no GPU; check nvidia-smi and the driver, or rehearse with --cpu")
    return figures


def data(place: Place) -> Figures:
    """Make questions, a team's trajectories, training files and a random model."""
    venv = place.rl_venv if (place.rl_venv / "bin/python").exists() else place.sft_venv
    place.afm(
        venv,
        "data",
        "distill",
        "questions/train.csv",
        "--team",
        "team.yaml",
        "--rewards",
        "rewards.yaml",
        "--output-dir",
        "runs/team",
    )
    place.afm(
        venv,
        "data",
        "filter",
        "runs/team/trajectories.jsonl",
        "--config",
        "filters.yaml",
        "--agent",
        "agent.yaml",
        "--output-dir",
        "runs/kept",
    )
    prepare = (
        "data",
        "prepare",
        "sft",
        "runs/kept/kept.jsonl",
        "--agent",
        "agent.yaml",
        "--tools",
        "tools.yaml",
        "--name",
        "weekdays",
    )
    place.afm(venv, *prepare, "--output-dir", "runs/data")
    place.afm(
        venv,
        "data",
        "prepare",
        "rl",
        "questions/rl.csv",
        "--agent",
        "agent.yaml",
        "--out",
        "runs/data/rl.parquet",
    )
    place.run([place.python(venv), "start_model.py"])
    parameters = place.run([place.python(venv), "-c", MODEL])
    return {
        "trajectories": lines(place.task / "runs/kept/kept.jsonl"),
        "parameters": int(parameters.split()[-1]),
    }


def masks(place: Place) -> Figures:
    """Check that both environments train on the same tokens."""
    words = ("mask", "runs/kept/kept.jsonl", "--agent", "agent.yaml", "--tokenizer", "runs/start", "--json")
    first, second = (place.afm(venv, *words) for venv in (place.sft_venv, place.rl_venv))
    if first != second:
        raise FailureError("the two environments do not train on the same tokens")
    rows = [json.loads(line) for line in first.splitlines()]
    return {"rows": len(rows), "trained_tokens": sum(row["trained"] for row in rows), "equal": True}


def sft(place: Place) -> Figures:
    """Fine-tune with ZeRO-3 on the GPU in bfloat16."""
    options = ["max_steps=300", "save_steps=150"]
    if not place.cpu:
        place.needs(place.sft_venv, "deepspeed")
        options += [f"deepspeed={ROOT / 'configs/deepspeed/zero3.json'}", "use_cpu=false", "bf16=true"]
    begun = time.monotonic()
    place.afm(place.sft_venv, "sft", "sft.yaml", "--quiet", *options)
    rows = [
        json.loads(line)
        for line in (place.task / "runs/sft/trainer_log.jsonl").read_text("utf-8").splitlines()
    ]
    losses = [row["loss"] for row in rows if "loss" in row]
    if not losses[-1] < losses[0] / 2:
        raise FailureError(f"the loss went from {losses[0]} to {losses[-1]}, expected less than half")
    return {"loss_first": losses[0], "loss_last": losses[-1], "seconds": round(time.monotonic() - begun)}


def evaluate(place: Place, model: str, out: str) -> Figures:
    """Return pass@1 on the held-out questions."""
    place.afm(place.rl_venv, "eval", "eval.yaml", f"model={model}", f"output_dir={out}", "keep_tokens=true")
    metrics = json.loads((place.task / out / "metrics.json").read_text("utf-8"))
    return {"metrics": {key: metrics[key] for key in ("episodes", "pass@1", "format") if key in metrics}}


def eval_sft(place: Place) -> Figures:
    """Evaluate the fine-tuned model, and keep the tokens of its episodes."""
    return evaluate(place, "runs/sft", "runs/eval_sft")


def logprobs(place: Place) -> Figures:
    """Compare the log-probabilities of these tokens on the GPU with those on the CPU in float32."""
    gaps: Figures = json.loads(place.run([place.python(place.rl_venv), "-c", LOGPROBS]).splitlines()[-1])
    if gaps["float32"] > 1e-2 or gaps["bfloat16"] > 1.0:
        raise FailureError(f"log-probabilities differ from the CPU's by up to {gaps}")
    return gaps


def rl_words(place: Place, out: str) -> list[str]:
    """Return the command for DAPO with vLLM on the GPU, or with our engine in a rehearsal."""
    words = [
        "rl",
        "rl.yaml",
        f"output_dir={out}",
        f"verl.trainer.total_training_steps={STEPS_RL}",
        f"verl.trainer.save_freq={SAVE_EVERY}",
    ]
    if place.cpu:
        return words
    rollout = "verl.actor_rollout_ref.rollout"
    return [*words, "platform=gpu", f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size=1",
            f"{rollout}.gpu_memory_utilization=0.3", "verl.actor_rollout_ref.actor.strategy=fsdp2", "verl.trainer.n_gpus_per_node=1", "verl.trainer.nnodes=1"]  # fmt: skip


def rl(place: Place) -> Figures:
    """Train a whole run: every sync delivers the weights, and no token drifts."""
    if not place.cpu:
        place.needs(place.rl_venv, "vllm")
    begun = time.monotonic()
    place.afm(place.rl_venv, *rl_words(place, "runs/rl"))
    return checked_steps(place.task / "runs/rl") | {"seconds": round(time.monotonic() - begun)}


def rl_killed(place: Place) -> Figures:
    """Train the same run, killed with SIGKILL after its second checkpoint and started again."""
    if not place.cpu:
        place.needs(place.rl_venv, "vllm")
    out = place.task / "runs/rl_killed"
    words = [place.python(place.rl_venv), "-m", "afm.cli.main", *rl_words(place, str(out))]
    with (place.folder / "smoke.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(words, cwd=place.task, env=environment(), stdout=log, stderr=log)
        deadline = time.monotonic() + LIMIT_S
        while lines(out / "metrics.jsonl") <= SAVE_EVERY and process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                raise FailureError(f"no step {SAVE_EVERY + 1} after {LIMIT_S} s")
            time.sleep(0.2)
        killed_after = lines(out / "metrics.jsonl")
        process.send_signal(signal.SIGKILL)
        process.wait()
    place.run(words)
    return checked_steps(out) | {"killed_after_step": killed_after}


def checked_steps(out: Path) -> Figures:
    """Check that all steps of a run exist once and are exact; return figures."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    if [row["step"] for row in rows] != list(range(1, STEPS_RL + 1)):
        raise FailureError(f"steps {[row['step'] for row in rows]}, expected 1 to {STEPS_RL}, each once")
    if drifted := [row["step"] for row in rows if row["token_drift"]]:
        raise FailureError(f"tokens drifted in steps {drifted}")
    return {
        "steps": len(rows),
        "step_seconds": round(sorted(row["seconds"] for row in rows)[len(rows) // 2], 1),
        "probs_diff_max": max(row["probs_diff_max"] for row in rows),
        "reward": [round(row["reward"], 3) for row in (rows[0], rows[-1])],
    }


def eval_rl(place: Place) -> Figures:
    """Evaluate the model after RL."""
    return evaluate(place, "runs/rl", "runs/eval_rl")


def lines(path: Path) -> int:
    """Return the number of lines of a file; 0 if it is missing."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


STEPS: Mapping[str, Callable[[Place], Figures]] = {
    step.__name__: step for step in (machine, data, masks, sft, eval_sft, logprobs, rl, rl_killed, eval_rl)
}


def attempt(name: str, place: Place) -> tuple[str, str]:
    """Run a step, or read its stored result; return its state and text."""
    kept = place.folder / "steps" / f"{name}.json"
    if kept.exists():
        return "passed", kept.read_text("utf-8").strip()
    try:
        figures = STEPS[name](place)
    except SkipError as reason:
        return "skipped", str(reason)
    except (FailureError, OSError, KeyError, ValueError) as error:
        return "FAILED", f"{type(error).__name__}: {error}" if not isinstance(error, FailureError) else str(
            error
        )
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    return "passed", json.dumps(figures)


def main() -> int:
    """Run the steps in order and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/gpu_smoke"))
    parser.add_argument("--sft-venv", type=Path, required=True)
    parser.add_argument("--rl-venv", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="rehearse the steps without a GPU")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="run only these steps")
    options = parser.parse_args()
    place = Place(
        options.output_dir.absolute(), options.sft_venv.absolute(), options.rl_venv.absolute(), options.cpu
    )
    place.folder.mkdir(parents=True, exist_ok=True)
    if not place.task.exists():
        subprocess.run(
            [sys.executable, "-m", "afm.cli.main", "init", str(place.task)],
            env=environment(),
            check=True,
            stdout=subprocess.DEVNULL,
        )
    results = {}
    for name in options.only:
        print(f"{name}: {(STEPS[name].__doc__ or '').strip()}", flush=True)
        results[name] = attempt(name, place)
        print(f"  {results[name][0]}: {results[name][1]}", flush=True)
    print("\n| step | state | figures |\n|---|---|---|")
    for name, (state, text) in results.items():
        print(f"| {name} | {state} | {text} |")
    print(f"\nCommands and their output: {place.folder / 'smoke.log'}")
    return int(any(state == "FAILED" for state, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
