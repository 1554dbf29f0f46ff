"""Real steps of verl on a new random model: weights change, probabilities agree, a killed run continues."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from extras import needs

from afm.agents import agent_of_model, load_agent
from afm.datasets import Task
from afm.datasets.rl_files import write_rl
from afm.processes import tied_environment
from afm.trajectory import read_records
from afm.trajectory.record import load_advantages
from verl_ext.alarms import ALARMS_FILE, read_alarms
from verl_ext.checkpoints import CHECKPOINT_REQUEST, saved_step
from verl_ext.kept_episodes import episodes_file
from verl_ext.launcher import run_rl
from verl_ext.processes import ALARMED, adopt_orphans, descendants, end
from verl_ext.settings import load_settings

needs("verl")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def settings(folder: Path, model: Path) -> dict[str, Any]:
    """PPO with its critic (DAPO is what the quickstart runs).

    A random model never solves a question, so the reward is for a short episode, which differs from the first step on.
    """
    tiny = load_settings(ROOT / "configs/tiny/rl/mhqa_ppo.yaml").model_dump(mode="json", exclude_unset=True)
    verl = tiny["verl"]
    verl["data"] |= {"train_batch_size": 16, "max_prompt_length": 160}
    actor, each = verl["actor_rollout_ref"], {"log_prob_micro_batch_size_per_gpu": 8}
    actor["actor"] |= {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 8}
    actor["rollout"] |= each | {"+engine_kwargs": {"afm_cpu": {"processes": 2}}}
    actor["ref"] |= each
    verl["critic"] |= {"ppo_micro_batch_size_per_gpu": 8}
    verl["trainer"] |= {"total_training_steps": 3, "save_freq": 2, "test_freq": 3}
    return tiny | {
        "agent": str(ROOT / "configs/tiny/agents/math.yaml"),
        "agents": {
            "math": {"data_sources": ["mini_math"]},
            "code": {
                "agent": str(ROOT / "configs/tiny/agents/code.yaml"),
                "abilities": ["code"],
                "limits": {"max_response_tokens": 64},
                "rewards": {"formula": "overlong", "overlong": {"max_tokens": 64, "buffer_tokens": 64}},
            },
        },
        "tools": str(ROOT / "configs/tools/code_executor.yaml"),
        "model": str(model),
        "train_files": str(folder / "rl.parquet"),
        "val_files": str(folder / "val.parquet"),
        "output_dir": str(folder / "a run"),
        "limits": {"max_response_tokens": 96},
        "curriculum": {},
        "trackers": ["tensorboard", "wandb", "swanlab"],
        "rewards": {"formula": "overlong", "overlong": {"max_tokens": 96, "buffer_tokens": 96}},
        "verl": verl,
    }


def write_rows(path: Path, count: int = 64) -> None:
    """Write rows of mathematics and of programs in turn."""

    def task(number: int) -> Task:
        of_code = {"data_source": "codeforces", "ability": "code"}
        of_code["ground_truth"] = {"inputs": [f"{number}\n"], "outputs": [f"{number + 1}\n"]}
        of_math = {"data_source": "mini_math", "ground_truth": str(number + 1)}
        return Task(id=f"q{number}", question=f"{number}+1?", **(of_code if number % 2 else of_math))

    write_rl(map(task, range(count)), load_agent(str(ROOT / "configs/tiny/agents/math.yaml")), path)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    from afm.models.tiny import create_tiny_model

    folder = tmp_path_factory.mktemp("rl")
    create_tiny_model(tokenizer_dir, folder / "model", seed=0, hidden_size=32, layers=1)
    write_rows(folder / "rl.parquet")
    write_rows(folder / "val.parquet", 4)
    path = folder / "rl.yaml"  # the first agent is the main one
    path.write_text(yaml.safe_dump(settings(folder, folder / "model"), sort_keys=False))
    return path


def start(*words: str, **variables: str) -> subprocess.Popen[str]:
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, **streams, env=tied_environment() | variables)


def train(config: Path, *overrides: str) -> subprocess.Popen[str]:
    return start(sys.executable, "-m", "verl_ext.launcher", str(config), *overrides)


def wait_for_first_step(process: subprocess.Popen[str]) -> None:
    """Return when the run reports its first step."""
    seen: list[str] = []
    while not seen or (seen[-1] and not seen[-1].startswith("step 1/")):
        seen.append(process.stdout.readline())  # type: ignore[union-attr]
    assert seen[-1], seen


@pytest.fixture(scope="module")
def trained(config: Path) -> tuple[Path, str]:
    """A run whose launcher was killed after its first step and started again: its folder and second output.

    It continues from a requested checkpoint, because none is planned before the second step.
    """
    adopt_orphans()  # of the killed launcher and of Ray, so that no run of another process is taken for this one
    before = descendants(os.getpid())
    (config.parent / "a run").mkdir()
    (config.parent / "a run" / CHECKPOINT_REQUEST).touch()
    one_engine = "verl.actor_rollout_ref.rollout.+engine_kwargs.afm_cpu.processes=1"
    process = train(config, one_engine, "trackers=[]")  # what begins sooner is killed sooner
    wait_for_first_step(process)
    process.kill()
    process.wait()
    process = train(config)
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output
    left = descendants(os.getpid()) - before
    end(left)
    assert left == set()
    return config.parent / "a run", output


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def test_each_step_is_one_line_of_documented_metrics(trained: tuple[Path, str]) -> None:
    folder, output = trained
    found = rows(folder)
    assert [row["step"] for row in found] == [1, 2, 3]
    for row in found:
        assert {"reward", "format", "entropy", "grad_norm", "response_tokens", "seconds", "kl"} <= row.keys()
        assert {"value_loss", "mismatch_kl", "slowest_episode_seconds"} <= row.keys()
        assert row["token_drift"] == 0
        parts = row["by_agent"]
        assert parts["math"]["score"] == row["by_source"]["mini_math"]["score"]
        assert sum(part["groups"] for part in parts.values()) == row["groups_generated"]
        assert sum(part["groups"] * part["score"] for part in parts.values()) == pytest.approx(
            row["reward"] * row["groups_generated"]
        )
        assert -1 <= row["reward"] <= 0
        assert row["groups_kept"] >= 4
    # Half of the 64 questions rest, so that 32 are asked before one can come again; the kill forgets none.
    asked = [row["questions_asked"] for row in found]
    assert asked[:2] == [16, 32]
    assert 40 < asked[2] <= 48
    assert "step 3/3  reward -" in output


def test_rollout_and_trainer_agree_on_every_probability(trained: tuple[Path, str]) -> None:
    for row in rows(trained[0]):
        assert row["engine"]["training/rollout_probs_diff_valid"] == 1
        assert 0 < row["probs_diff_max"] < 1e-4


def test_the_exported_model_loads_and_has_moved(trained: tuple[Path, str], config: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained[0] / "model"
    before, after = weights(config.parent / "model"), weights(folder)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > len(before) // 2
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    assert load_agent(folder / "agent.yaml").name == "math"
    assert agent_of_model(folder, "code").limits.max_response_tokens == 64
    assert agent_of_model(folder, "math").limits.max_response_tokens == 96


def test_a_finished_run_says_so(trained: tuple[Path, str], config: Path, capsys: Any) -> None:
    assert run_rl(config) == 0
    assert "already trained for 3 steps" in capsys.readouterr().out


def test_a_last_step_that_nobody_watched_is_taken_over(
    trained: tuple[Path, str], config: Path, capsys: Any
) -> None:
    """The trainer's processes outlive a killed `afm rl` for a moment, which is enough for a step and its checkpoint."""
    folder, metrics = trained[0], trained[0] / "metrics.jsonl"
    before = metrics.read_text()
    metrics.write_text("".join(before.splitlines(keepends=True)[:-1]))
    shutil.rmtree(folder / "model")
    assert run_rl(config) == 0
    assert "model of step 3" in capsys.readouterr().out
    assert metrics.read_text() == before
    assert (folder / "model" / "model.safetensors").is_file()


def test_a_killed_run_goes_on_from_its_checkpoint(trained: tuple[Path, str]) -> None:
    folder, output = trained
    assert re.search(r"resuming after step [12]\n", output)
    assert json.loads((folder / "model" / "training.json").read_text())["global_step"] == 3
    assert not (folder / "processes.json").exists()
    assert not (folder / CHECKPOINT_REQUEST).exists()


def test_trackers_write_into_the_output_folder(trained: tuple[Path, str]) -> None:
    folder = trained[0]
    assert list(folder.glob("tensorboard/**/events.out.tfevents.*"))
    assert list(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert any(path.is_file() for path in folder.glob("swanlab/**/*"))


def test_sampled_episodes_of_each_step_are_kept(trained: tuple[Path, str]) -> None:
    folder = trained[0]
    kept = [list(read_records(episodes_file(folder, step))) for step in (1, 2, 3)]
    assert all(kept)
    for step, records in enumerate(kept, start=1):
        assert {record.provenance["step"] for record in records} == {step}
        assert all(record.agent == record.provenance["route"] for record in records)
        assert all(len(record.response_ids) <= 64 for record in records if record.agent == "code")
        assert len({record.id for record in records}) == len(records)


def test_kept_episodes_that_were_trained_on_have_advantages(trained: tuple[Path, str]) -> None:
    folder, every = trained[0], []
    for step in (1, 2, 3):
        file = episodes_file(folder, step)
        known = load_advantages(file)
        records = {record.id: record for record in read_records(file)}
        assert known.keys() == {name for name, one in records.items() if "validation" not in one.provenance}
        for name, advantages in known.items():  # the critic has a value for each token
            assert len(advantages) == len(records[name].response_ids)
            every += advantages
    assert all(map(math.isfinite, every))
    assert min(every) < 0 < max(every)


def test_a_validation_is_told_apart(trained: tuple[Path, str]) -> None:
    folder = trained[0]
    of_step = [
        {record.provenance.get("validation", False) for record in read_records(episodes_file(folder, step))}
        for step in (2, 3)
    ]
    assert of_step == [{False}, {False, True}]
    last = rows(folder)[-1]
    assert (last["validation_episodes"], last["validation_solved"]) == (4, 0.0)
    assert -1 <= last["validation_reward"] <= 0
    scores = [last["validation_by_agent"][name]["score"] for name in ("math", "code")]
    assert sum(scores) / 2 == pytest.approx(last["validation_reward"])
    assert "validation_reward" not in rows(folder)[1]
    assert last["engine"]["val-core/mini_math/acc/mean@1"] == 0.0


def start_tiny(
    config: Path, script: str, folder: Path, *overrides: str, **variables: str
) -> subprocess.Popen[str]:
    """Start the CPU version of a recipe as a user does, on a new model."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables |= {"MODEL": str(config.parent / "model"), "PATH": path}
    words = [f"train_files={config.parent / 'rl.parquet'}", f"output_dir={folder}", *overrides]
    return start(str(ROOT / script), *words, **variables)


@pytest.mark.proof
def test_an_interrupted_run_ends_cleanly_with_groups_that_differ(config: Path) -> None:
    """The CPU version of the web recipe."""
    folder = config.parent / "dapo"
    script = "train/web_agent/rl/train_dapo_web_agent_tiny.sh"
    process = start_tiny(
        config, script, folder, "verl.trainer.total_training_steps=30", "verl.trainer.save_freq=30"
    )
    wait_for_first_step(process)
    family = descendants(process.pid)
    assert family
    [launcher] = [
        int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    for number in (process.pid, launcher):  # as a terminal does
        os.kill(number, signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    assert (
        "stopping the trainer, which takes a few seconds\nstopped; no checkpoint was saved yet: the same command starts from the beginning\n"
        in output
    )
    assert [mark for mark in family if mark.alive] == []
    first = rows(folder)[0]
    assert first["groups_kept"] >= 4
    assert first["groups_generated"] >= first["groups_kept"]
    assert "value_loss" not in first


@pytest.mark.proof
def test_an_alarm_that_stops_a_run_leaves_a_checkpoint(config: Path) -> None:
    """The CPU version of the code recipe, which plans no checkpoint before the last of its 30 steps."""
    folder = config.parent / "stopped"
    process = start_tiny(
        config,
        "train/code_agent/rl/train_dapo_code_agent_tiny.sh",
        folder,
        "alarms.long_tail={above: 1.0001, seconds: 0.001, steps: 1, action: stop}",
        "verl.trainer.total_training_steps=30",
        "verl.trainer.save_freq=30",
        RECIPE="code_dapo",
    )
    output, _ = process.communicate(timeout=600)
    assert process.returncode == ALARMED, output
    last = rows(folder)[-1]["step"]
    assert last < 30
    assert saved_step(folder / "checkpoints") == last
    assert "alarm long_tail: the run ends after the current step, once its checkpoint is saved\n" in output
    assert f"continue from the checkpoint of step {last} in" in output
    assert [finding.step for finding in read_alarms(folder / ALARMS_FILE)] == [1]
