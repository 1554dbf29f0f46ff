"""Real runs of `afm rl` with vLLM as rollout engine, on a CPU (requirements/install-vllm-cpu.sh)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from extras import needs
from reciting_agent import KNOWN, LONG, MOST, questions, write_agent

from afm.agents import load_agent
from afm.datasets.rl_files import write_rl
from afm.processes import tied_environment
from afm.trajectory import read_records
from afm.trajectory.record import Record, StopReason
from verl_ext.kept_episodes import episodes_file

needs("verl", "vllm")
pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.sandbox]

ROOT = Path(__file__).resolve().parents[2]
END_S = 90.0
"""A run whose engine died may take this long to end: Ray notices, the trainer is given ``loss_grace_s``."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    write_agent(folder)
    agent = load_agent(folder / "agent.yaml")
    write_rl(questions(40), agent, folder / "rl.parquet")
    write_rl(questions(5), agent, folder / "val.parquet")
    return folder


def write_config(folder: Path, name: str, engine: str, **verl: Any) -> Path:
    trainer = {"total_training_steps": 4, "save_freq": 1, "val_before_train": True}
    own: dict[str, Any] = {
        "data": {"train_batch_size": 4, "max_prompt_length": 64},
        "algorithm": {"filter_groups": {"enable": False}},
        "actor_rollout_ref": {
            "actor": {"ppo_mini_batch_size": 4, "ppo_epochs": 1, "ppo_micro_batch_size_per_gpu": 8},
            "rollout": {"name": engine, "n": 4, "log_prob_micro_batch_size_per_gpu": 8},
        },
    }
    settings = {
        "extends": [str(ROOT / "configs/tiny/rl/math.yaml"), *verl.pop("extends", [])],
        "agent": str(folder / "agent.yaml"),
        "model": str(folder / "model"),
        "tools": str(ROOT / "configs/tools/code_executor.yaml"),
        "rewards": {
            "formula": "correct * format + overlong",
            "overlong": {"max_tokens": 160, "buffer_tokens": 120},
        },
        "train_files": str(folder / "rl.parquet"),
        "val_files": str(folder / "val.parquet"),
        "output_dir": str(folder / name),
        "limits": {"max_response_tokens": 160},
        "episodes_per_step": 1000,
        "verl": own | {"trainer": trainer | verl},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def train(config: Path, *overrides: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "verl_ext.launcher", str(config), *overrides]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, **streams, env=tied_environment())


def follow(process: subprocess.Popen[str], begin: str) -> list[str]:
    """Return the lines up to the first that begins with ``begin``."""
    lines: list[str] = []
    while not lines or (lines[-1] and not lines[-1].startswith(begin)):
        lines.append(process.stdout.readline())  # type: ignore[union-attr]
    assert lines[-1], "".join(lines)
    return lines


def whole(config: Path, *overrides: str) -> str:
    process = train(config, *overrides)
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output
    return output


def engine_processes(process: subprocess.Popen[str], title: str) -> list[psutil.Process]:
    family = psutil.Process(process.pid).children(recursive=True)
    return [child for child in family if title in " ".join(child.cmdline())]


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each training step, without the row of a validation before the first."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"]]


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[Path, str, float, str]:
    """Three starts of one run: its engine is killed, then its launcher is killed, then it finishes.

    Returns the folder, the output of the first start after the kill, the seconds until its end, and the last output.
    """
    config = write_config(folder, "run", "vllm")
    process = train(config)
    follow(process, "step 1/")
    (worker,) = engine_processes(process, "VLLM::Worker")
    killed_at = time.monotonic()
    worker.send_signal(signal.SIGKILL)
    printed, _ = process.communicate(timeout=600)
    seconds = time.monotonic() - killed_at
    assert process.returncode == 1, printed
    process = train(config)
    follow(process, "step ")
    process.kill()
    process.wait()
    return folder / "run", printed, seconds, whole(config)


def test_a_dead_engine_ends_the_run_soon_and_says_so(trained: tuple[Path, str, float, str]) -> None:
    _, printed, seconds, _ = trained
    assert "the rollout engine failed" in printed
    assert "the same command continues with step" in printed
    assert seconds < END_S


def test_the_run_goes_on_from_its_checkpoints(trained: tuple[Path, str, float, str]) -> None:
    folder, _, _, output = trained
    assert "resuming after step" in output
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]
    assert json.loads((folder / "model" / "training.json").read_text())["global_step"] == 4


def test_the_engine_samples_what_the_trainer_trains_on(trained: tuple[Path, str, float, str]) -> None:
    """New weights arrive after each step. With old ones the probabilities would differ by far more."""
    for row in rows(trained[0]):
        assert row["token_drift"] == 0
        assert 0 < row["probs_diff_max"] < 1e-4


def validated(run: Path) -> dict[str, Record]:
    """Return the greedy episodes of the validation before the first step."""
    records = read_records(episodes_file(run, 0))
    return {record.question: record for record in records if record.provenance.get("validation")}


def test_greedy_episodes_are_those_of_our_engine(folder: Path, trained: tuple[Path, str, float, str]) -> None:
    """Tokens and masks are equal, and log-probabilities within 1e-4, also for long and unknown questions."""
    whole(write_config(folder, "ours", "afm_cpu", total_training_steps=1))
    theirs, ours = validated(trained[0]), validated(folder / "ours")
    assert len(ours) == 9
    assert theirs.keys() == ours.keys()
    for question, one in ours.items():
        other = theirs[question]
        assert (other.response_ids, other.response_mask, other.stop) == (
            one.response_ids,
            one.response_mask,
            one.stop,
        )
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    solved = theirs["{}+{}?".format(*KNOWN[0])]
    assert solved.verdict is not None
    assert (solved.stop, solved.verdict.parts["correct"]) == (StopReason.ANSWER, 1.0)
    assert theirs[LONG].stop is StopReason.RESPONSE_TOKENS
    assert (theirs[MOST].response_mask or ()).count(0) > 90
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert len(tokenizer.encode("</code>", add_special_tokens=False)) > 1


def test_forty_asynchronous_steps_with_aborted_episodes(folder: Path) -> None:
    """Episodes that a weight update aborts continue with the new weights, and no token drifts."""
    config = write_config(
        folder,
        "ahead",
        "vllm",
        extends=[str(ROOT / "configs/rl/async/colocate.yaml")],
        total_training_steps=40,
        save_freq=40,
        val_before_train=False,
    )
    whole(config, "verl.actor_rollout_ref.rollout.max_num_seqs=4")
    found = rows(folder / "ahead")
    assert [row["step"] for row in found] == list(range(1, 41))
    assert {row["token_drift"] for row in found} == {0}
    spans = [row["engine"]["training/off_policy/trajectory_spans/max"] for row in found]
    assert max(spans) > 1  # versions of the weights that took part in one episode
