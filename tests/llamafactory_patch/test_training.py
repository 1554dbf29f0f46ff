"""Real trainings: a few steps of a tiny model on the CPU."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from afm.agents import agent_of_model, load_agent
from afm.errors import ConfigError
from llamafactory_patch import run_sft

pytest.importorskip("llamafactory")
pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[2] / "configs/tiny/sft/math.yaml"
CALL = "<think>Use the tool.</think><code>print(17+25)</code>"


@pytest.fixture
def arguments(tiny, data_dir, tmp_path, monkeypatch):
    """Overrides of the tiny recipe for a small data set, in a folder whose name has a blank."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LLAMAFACTORY_VERBOSITY", "INFO")
    outputs = [f"{CALL}\n<observation>\n{n}\n</observation>\n<answer>{n}</answer>" for n in range(64)]
    rows = [{"instruction": f"What is {n}?", "input": "", "output": text} for n, text in enumerate(outputs)]
    folder = data_dir(rows)
    target = tmp_path / "my run"

    def make(**more):
        pairs = {
            "model_name_or_path": tiny,
            "dataset_dir": folder,
            "dataset": "rows",
            "output_dir": target,
            "max_steps": 5,
            "warmup_steps": 1,
            "logging_steps": 1,
            "per_device_train_batch_size": 4,
            "cutoff_len": 256,
            **more,
        }
        return [f"{key}={value}" for key, value in pairs.items()]

    make.target = target
    return make


def history(folder):
    lines = (folder / "trainer_log.jsonl").read_text("utf-8").splitlines()
    return {entry["current_steps"]: entry["loss"] for entry in map(json.loads, lines) if "loss" in entry}


def test_a_training_leaves_a_complete_model_and_its_story(arguments, capsys):
    target = arguments.target
    assert run_sft(CONFIG, arguments()) == 0
    assert "train_loss" in capsys.readouterr().out
    losses = history(target)
    assert sorted(losses) == [1, 2, 3, 4, 5]
    assert losses[5] < losses[1]
    assert "train_loss" in (target / "training.log").read_text("utf-8")
    assert agent_of_model(target, "math") == load_agent(CONFIG.parents[1] / "agents/math.yaml")
    assert json.loads((target / "config.json").read_text("utf-8"))["use_cache"] is True
    assert (
        json.loads((target / "sft_manifest.json").read_text("utf-8"))["versions"]["llamafactory"] == "0.9.5"
    )

    before = (target / "model.safetensors").stat().st_mtime_ns
    assert run_sft(CONFIG, arguments()) == 0
    assert "is finished" in capsys.readouterr().out
    assert (target / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="max_steps: 5 -> 6"):
        run_sft(CONFIG, arguments(max_steps=6))


def test_two_processes_train_what_one_does(arguments, monkeypatch):
    """Same rows in every step: batch 4 of one process is batch 2 of two."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert run_sft(CONFIG, arguments(disable_shuffling=True), echo=False) == 0
    alone = history(arguments.target)
    monkeypatch.setenv("FORCE_TORCHRUN", "1")
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    pair = arguments.target.with_name("pair")
    options = arguments(disable_shuffling=True, per_device_train_batch_size=2, output_dir=pair)
    assert run_sft(CONFIG, options, echo=False) == 0, (pair / "training.log").read_text("utf-8")[-2000:]
    log = (pair / "training.log").read_text("utf-8")
    assert "Initializing 2 distributed tasks" in log
    assert history(pair) == pytest.approx(alone, rel=1e-3)


def test_the_gpu_recipe_trains_under_zero3_on_two_processes(arguments, monkeypatch):
    pytest.importorskip("deepspeed")
    if shutil.which("g++") is None:
        pytest.skip("DeepSpeed compiles its CPU optimizer; install g++")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(arguments.target.with_name("extensions")))
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    recipe = CONFIG.parents[2] / "sft/code_agent_qwen2.5_7b.yaml"
    small = {"bf16": False, "template": "qwen3_nothink", "preprocessing_num_workers": 2}
    assert run_sft(recipe, arguments(max_steps=2, **small), echo=False) == 0
    log = (arguments.target / "training.log").read_text("utf-8")
    assert "Initializing 2 distributed tasks" in log
    assert "DeepSpeed ZeRO3 detected" in log
    assert sorted(history(arguments.target)) == [1, 2]
    assert agent_of_model(arguments.target, "code") == load_agent("code")
    assert (arguments.target / "model.safetensors").stat().st_size > 50_000


def test_the_trainers_failure_is_the_exit_status_and_is_logged(arguments):
    assert run_sft(CONFIG, arguments(template="absent"), echo=False) == 1
    assert "Template absent does not exist" in (arguments.target / "training.log").read_text("utf-8")
    assert not (arguments.target / "agent.yaml").exists()


def test_a_broken_row_ends_the_training_with_one_clear_line(arguments, data_dir):
    folder = data_dir([{"instruction": "a", "input": "", "output": "b</observation>"}])
    assert run_sft(CONFIG, arguments(), echo=False) == 1
    last = (arguments.target / "training.log").read_text("utf-8").splitlines()[-1]
    expected = f"error: {folder}/rows.json:1, row 1 ('a'): </observation> at character 1 closes nothing"
    assert last == expected


def test_a_killed_training_continues_from_its_checkpoint(arguments, capsys):
    """`kill -9` of the caller after the first checkpoint; the next start takes it up there."""
    options = arguments(max_steps=400, save_steps=3, save_total_limit=2, seed=3)
    command = [sys.executable, "-m", "llamafactory_patch.launcher", str(CONFIG), *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    caller = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not list(arguments.target.glob("checkpoint-*/trainer_state.json")):
        assert caller.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    caller.kill()
    caller.wait()

    assert run_sft(CONFIG, arguments(max_steps=400, save_steps=200, logging_steps=100, seed=3)) == 0
    assert "continuing from" in capsys.readouterr().out
    steps = [
        entry["step"]
        for entry in json.loads((arguments.target / "trainer_state.json").read_text())["log_history"]
    ]
    assert steps == sorted(steps)
    assert steps[-1] == 400
    assert steps[0] == 1
    assert list(history(arguments.target))[-1] == 400
