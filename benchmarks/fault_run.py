"""A small real training that is broken on purpose: its inputs, its processes, and the checks afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml
from timing import REPO

from afm.models.tiny import create_tiny_model, train_tokenizer
from verl_ext.processes import Process, descendants, end

SECONDS = 600
"""Longest wait for any condition."""
PROMPTS, SAMPLES, ROWS, TOKENS = 4, 2, 64, 320
TEXTS = ("Tom has 12 coins. How many?", "<plan>p</plan><think>t</think><answer>12</answer>")


def make_inputs(folder: Path, steps: int, **changes: Any) -> Path:
    """Write a random model, 64 questions and the settings of a run on the CPU; return the settings file.

    Args:
        steps: Steps of the whole run, with a checkpoint after every second step.
        changes: Override settings.
    """
    train_tokenizer(TEXTS * 40, folder / "tokenizer", vocab_size=300)
    create_tiny_model(folder / "tokenizer", folder / "model", seed=0, hidden_size=32, layers=1)
    write_questions(folder / "rl.parquet", [(f"{number}+1?", str(number + 1)) for number in range(ROWS)])
    settings = {
        "extends": str(REPO / "configs/tiny/rl/math.yaml"),
        "model": str(folder / "model"),
        "train_files": str(folder / "rl.parquet"),
        "output_dir": str(folder / "run"),
        "limits": {"max_response_tokens": TOKENS},
        "episodes_per_step": 1000,
        # A random model solves nothing. It is rewarded for ending early, so that rewards differ.
        "rewards": {"formula": "overlong", "overlong": {"max_tokens": TOKENS, "buffer_tokens": TOKENS}},
        "verl": {
            "data": {"train_batch_size": PROMPTS, "max_prompt_length": 160},
            "algorithm": {"filter_groups": {"enable": False}},
            "actor_rollout_ref": {
                "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 2},
                "rollout": {"n": SAMPLES, "log_prob_micro_batch_size_per_gpu": 2},
            },
            "trainer": {"total_training_steps": steps, "save_freq": 2},
        },
    }
    (folder / "rl.yaml").write_text(yaml.safe_dump(settings | changes))
    return folder / "rl.yaml"


def write_questions(path: Path, questions: list[tuple[str, str]]) -> None:
    """Write the data of a run."""
    rows = [
        {
            "data_source": "mini_math",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"ground_truth": gold},
            "extra_info": {"index": f"q{number}", "question": question},
        }
        for number, (question, gold) in enumerate(questions)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


class Run:
    """One start of a run.

    Args:
        config: Settings file.
        overrides: ``key=value`` overrides.
        prefix: Words before the command, such as those that enter a namespace.
        variables: Added to the environment.
    """

    def __init__(
        self,
        config: Path,
        *overrides: str,
        prefix: tuple[str, ...] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = config.parent / "run"
        for override in overrides:
            if override.startswith("output_dir="):
                self.folder = Path(override.partition("=")[2])
        number = len(list(config.parent.glob("output_*.log")))
        self.output = config.parent / f"output_{number:02d}.log"
        words = [*prefix, sys.executable, "-m", "afm.cli.main", "rl", str(config), *overrides]
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                words,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=REPO,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(variables or {}),
                start_new_session=True,
            )
        self._seen: set[Process] = set()

    def steps(self) -> list[int]:
        """Return the steps in the metrics, in order."""
        return [row["step"] for row in self.metrics()]

    def logged(self) -> list[int]:
        """Return the steps that the trainer of this start has done."""
        return [row["step"] for row in self._lines("engine_metrics.jsonl")]

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of the metrics."""
        return self._lines("metrics.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def text(self) -> str:
        """Return the output of the command."""
        return self.output.read_text(errors="replace")

    def family(self) -> dict[Process, str]:
        """Return every process of the run with its title."""
        found = {}
        for process in descendants(self.process.pid):
            try:
                words = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            except OSError:
                continue
            found[process] = words.replace(b"\0", b" ").decode(errors="replace").strip()
        self._seen |= found.keys()
        return found

    def titled(self, part: str) -> dict[Process, str]:
        """Return the processes whose title contains ``part``."""
        return {process: title for process, title in self.family().items() if part in title}

    def wait_until(self, what: str, condition: Callable[[], Any], pause_s: float = 0.1) -> Any:
        """Wait for ``condition`` to be true, and return its value.

        Raises:
            SystemExit: It stays false, or the run ends first.
        """
        begun = time.monotonic()
        while not (value := condition()):
            if self.process.poll() is not None or time.monotonic() - begun > SECONDS:
                raise SystemExit(
                    f"the run ended or hangs before {what}; see {self.output} and {self.folder}/training.log"
                )
            time.sleep(pause_s)
        return value

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has done ``step``, possibly again."""
        text = f"step {step}/"
        self.wait_until(f"step {step}", lambda: f"\n{text}" in f"\n{self.text()}", 0.02)

    def ended(self) -> tuple[int, float]:
        """Wait for the end; return the exit status, and the seconds until all processes were gone."""
        begun = time.monotonic()
        self.family()
        status = self.process.wait(SECONDS)
        while left := [process for process in self._seen if process.alive]:
            if time.monotonic() - begun > SECONDS:
                end(left)
                raise SystemExit(f"{len(left)} processes outlive the run; see {self.output}")
            time.sleep(0.05)
        return status, time.monotonic() - begun

    def stop(self) -> None:
        """Kill the run."""
        family = self.family()
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS)
        end(family.keys())

    def samples(self) -> Counter[tuple[int, str]]:
        """Count from the kept episodes how often each question was sampled in each step."""
        found: Counter[tuple[int, str]] = Counter()
        for file in sorted((self.folder / "episodes").glob("step_*.jsonl")):
            # A response may hold U+2028, which ends a line of a str.
            for line in file.read_bytes().splitlines():
                row = json.loads(line)
                found[int(file.stem.removeprefix("step_")), row["question"]] += 1
        return found


def whole(run: Run, steps: int) -> dict[str, bool]:
    """Check that an interrupted and continued run has every step and every sample once."""
    samples = run.samples()
    questions = Counter(question for _, question in samples)
    exported = json.loads((run.folder / "model" / "training.json").read_text())["global_step"]
    return {
        "each step once in the metrics": run.steps() == list(range(1, steps + 1)),
        "each sample once": set(samples.values()) == {SAMPLES},
        "no question twice, none left out": set(questions.values()) == {1} and len(questions) % steps == 0,
        "model of the last step": exported == steps,
    }
