"""Real trainings: a few steps of a tiny model on the CPU."""

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import yaml

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


def test_a_training_leaves_a_complete_model_and_its_story(arguments, capsys, monkeypatch):
    target = arguments.target
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers = {"report_to": "[tensorboard,wandb]", "use_swanlab": True, "swanlab_mode": "offline"}
    assert run_sft(CONFIG, arguments(plot_loss=True, **trackers)) == 0
    shown = capsys.readouterr().out
    assert "train_loss" in shown
    assert shown.index("training data: 64 sequences") < shown.index("--- sequence 33") < shown.index("'loss'")
    roles = json.loads((target / "data_statistics.json").read_text("utf-8"))["roles"]
    assert roles["observation"]["trained"] == 0 < roles["observation"]["tokens"]
    assert roles["code"]["trained"] == roles["code"]["tokens"] > 0
    check_trackers(target)
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


def check_trackers(target):
    """Every tracker has kept the losses; none was reached over the network."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(target / "tensorboard")).Reload().Scalars("train/loss")
    losses = history(target)
    assert {event.step: event.value for event in events} == pytest.approx(losses)
    for pattern in ("wandb/offline-run-*/*.wandb", "swanlab/run-*/*.swanlab"):
        (kept,) = target.glob(pattern)
        assert kept.read_bytes().count(b"train/loss") >= len(losses), pattern
    assert (target / "training_loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.proof
def test_two_nodes_and_fsdp2_train_what_one_process_does(arguments, monkeypatch):
    """Same rows in every step: batch 4 of one process is batch 2 of two."""
    assert run_sft(CONFIG, arguments(disable_shuffling=True), echo=False) == 0
    alone = history(arguments.target)

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    nodes = arguments.target.with_name("nodes")
    halves = {"disable_shuffling": True, "per_device_train_batch_size": 2}
    job = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "llamafactory_patch.launcher", str(CONFIG)]
    command += arguments(output_dir=nodes, **halves)
    env = {**os.environ, **job, "PYTHONPATH": os.pathsep.join(sys.path)}
    both = [
        subprocess.Popen(command, env={**env, "NODE_RANK": rank}, stdout=subprocess.DEVNULL) for rank in "10"
    ]
    assert [process.wait() for process in both] == [0, 0], (nodes / "training.log").read_text("utf-8")[-2000:]
    assert "Multi-node training enabled" in (nodes / "training.node1.log").read_text("utf-8")
    assert history(nodes) == pytest.approx(alone, rel=1e-3)

    monkeypatch.setenv("NPROC_PER_NODE", "2")
    sharded = arguments.target.with_name("fsdp2")
    fsdp2 = CONFIG.parents[2] / "fsdp/fsdp2.json"
    assert run_sft(CONFIG, arguments(output_dir=sharded, fsdp_config=fsdp2, **halves), echo=False) == 0
    assert "You are using fsdp2" in (sharded / "training.log").read_text("utf-8")
    assert history(sharded) == pytest.approx(alone, rel=1e-3)
    assert (sharded / "model.safetensors").stat().st_size == (nodes / "model.safetensors").stat().st_size


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.proof
def test_the_gpu_recipe_trains_under_zero3_on_two_processes(arguments, monkeypatch):
    pytest.importorskip("deepspeed")
    if shutil.which("g++") is None:
        pytest.skip("DeepSpeed compiles its CPU optimizer; install g++")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(arguments.target.with_name("extensions")))
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    recipe = CONFIG.parents[2] / "sft/code_agent_qwen2.5_7b.yaml"
    small = {"bf16": False, "template": "qwen3_nothink", "preprocessing_num_workers": 2}
    small |= {"enable_liger_kernel": False, "disable_shuffling": True, "max_steps": 2}
    small |= {"learning_rate": 0.01, "warmup_steps": 0}
    assert run_sft(recipe, arguments(**small), echo=False) == 0
    log = (arguments.target / "training.log").read_text("utf-8")
    assert "Initializing 2 distributed tasks" in log
    assert "DeepSpeed ZeRO3 detected" in log
    assert sorted(history(arguments.target)) == [1, 2]
    assert agent_of_model(arguments.target, "code") == load_agent("code")
    assert (arguments.target / "model.safetensors").stat().st_size > 50_000

    alone = arguments.target.with_name("alone")
    one = {**small, "deepspeed": "", "use_cpu": True, "per_device_train_batch_size": 8}
    assert run_sft(recipe, arguments(output_dir=alone, **one), echo=False) == 0
    assert history(arguments.target) == pytest.approx(history(alone), rel=1e-3)
    assert history(alone)[2] < history(alone)[1] * 0.99


TRAIN_TWINS = """
import sys
from llamafactory_patch import install
from llamafactory_patch.preview import install_preview
install()
install_preview()
from llamafactory.train.tuner import run_exp
from llamafactory_patch.config import resolve
for twin in sys.argv[2:]:
    name = twin.rpartition("/")[2].removesuffix(".yaml")
    places = [f"{key}={sys.argv[1]}/{place}" for key, place in (("dataset_dir", "data"), ("output_dir", name))]
    run_exp(resolve(twin, [*places, f"model_name_or_path={sys.argv[1]}/tiny", "max_steps=2"]).config)
"""


def test_every_tiny_twin_trains(tiny, tmp_path, monkeypatch):
    """All of them in one process: starting the engine takes longer than the steps."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "tiny").symlink_to(tiny)
    (tmp_path / "data").mkdir()
    index = {}
    for agent in ("web", "mhqa", "code"):
        index[f"{agent}_agent_sft"] = {"file_name": f"{agent}.json"}
        text = json.dumps([twin_row(load_agent(agent), number) for number in range(16)])
        (tmp_path / "data" / f"{agent}.json").write_text(text, encoding="utf-8")
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(index), encoding="utf-8")
    twins = sorted(CONFIG.parent.glob("*_agent*.yaml"))
    assert len(twins) == 6
    command = [sys.executable, "-c", TRAIN_TWINS, tmp_path, *twins]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    for twin in twins:
        folder = tmp_path / twin.stem
        assert sorted(history(folder)) == [1, 2]
        trained = "adapter_model" if twin.stem.endswith("_lora") else "model"
        assert (folder / "checkpoint-2" / f"{trained}.safetensors").is_file()
        roles = json.loads((folder / "data_statistics.json").read_text("utf-8"))["roles"]
        assert roles["observation"]["trained"] == 0 < roles["observation"]["tokens"]
        assert roles["answer"]["trained"] == roles["answer"]["tokens"] > 0


def twin_row(agent, number):
    """A trajectory with a call of the agent's first tool."""
    tool, seen, answer = next(iter(agent.tool_roles)), agent.observation_role, agent.answer_role
    text = f"<{tool}>{number}</{tool}>\n<{seen}>\n{number}\n</{seen}>\n<{answer}>{number}</{answer}>"
    return {"instruction": agent.user_message(f"What is {number}?"), "input": "", "output": text}


def test_swanlab_keeps_the_losses_on_this_machine(arguments):
    pytest.importorskip("swanboard")
    tracked = {"use_swanlab": True, "swanlab_mode": "local", "swanlab_project": "local"}
    assert run_sft(CONFIG, arguments(max_steps=2, **tracked), echo=False) == 0
    losses = history(arguments.target)
    assert sorted(losses) == [1, 2]
    assert swanlab_losses(arguments.target / "swanlab") == pytest.approx(losses)


def swanlab_losses(folder):
    """Losses by step as `swanlab watch` finds them: a table of names, and a log for each."""
    with closing(sqlite3.connect(folder / "runs.swanlab")) as database:
        ((number,),) = database.execute("SELECT folder FROM tag WHERE name = 'train/loss'")
    (log,) = folder.glob(f"run-*/logs/{number}/*.log")
    entries = map(json.loads, log.read_text("utf-8").splitlines())
    return {entry["index"]: entry["data"] for entry in entries}


def test_the_trainers_failure_is_the_exit_status_and_is_logged(arguments, capfd):
    assert run_sft(CONFIG, arguments(template="absent"), echo=False) == 1
    assert "Template absent does not exist" in (arguments.target / "training.log").read_text("utf-8")
    assert "Template absent does not exist" in capfd.readouterr().err
    assert not (arguments.target / "agent.yaml").exists()


def test_a_broken_row_ends_the_training_with_one_clear_line(arguments, data_dir, capfd):
    folder = data_dir([{"instruction": "a", "input": "", "output": "b</observation>"}])
    assert run_sft(CONFIG, arguments(), echo=False) == 1
    last = (arguments.target / "training.log").read_text("utf-8").splitlines()[-1]
    expected = f"error: {folder}/rows.json:1, row 1 ('a'): </observation> at character 1 closes nothing"
    assert last == expected
    assert capfd.readouterr().err == f"{expected}\n"


def test_a_killed_training_ends_with_the_same_bits_as_one_that_was_not(arguments, capsys):
    """`kill -9` of the caller after the first checkpoint; the next start takes it up there."""
    whole = arguments.target.with_name("whole")
    length = {"max_steps": 60, "save_steps": 3, "save_total_limit": 2, "seed": 3}
    assert run_sft(CONFIG, arguments(output_dir=whole, **length), echo=False) == 0

    command = [sys.executable, "-m", "llamafactory_patch.launcher", str(CONFIG), *arguments(**length)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    caller = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not list(arguments.target.glob("checkpoint-*/trainer_state.json")):
        assert caller.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    assert not (arguments.target / "train_results.json").exists()

    assert run_sft(CONFIG, arguments(**length)) == 0
    assert "continuing from" in capsys.readouterr().out
    assert list(history(arguments.target)) == list(range(1, 61))
    assert history(arguments.target) == history(whole)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (whole, arguments.target)]
    assert weights[0] == weights[1]

    kill_while_saving(whole)
    assert run_sft(CONFIG, arguments(output_dir=whole, **length), echo=False) == 0
    assert list(history(whole)) == list(range(1, 61))
    assert (whole / "model.safetensors").read_bytes() == weights[0]


def kill_while_saving(folder):
    """Leave of a finished training what a kill behind its last step does: all checkpoints, no model, no mark."""
    (folder / "model.safetensors").unlink()
    manifest = json.loads((folder / "sft_manifest.json").read_text("utf-8"))
    (folder / "sft_manifest.json").write_text(json.dumps(manifest | {"finished": None}), encoding="utf-8")


def test_a_stock_configuration_needs_two_keys_more(arguments, tmp_path, monkeypatch):
    """A LoRA run as LLaMA-Factory's users write them, started with our command in the place of theirs."""
    data, model = (pair.partition("=")[2] for pair in arguments()[1::-1])
    stock = {
        "model_name_or_path": model,
        "trust_remote_code": True,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_target": "all",
        "dataset": "rows",
        "dataset_dir": data,
        "template": "qwen3_nothink",
        "cutoff_len": 512,
        "max_samples": 16,
        "preprocessing_num_workers": 1,
        "output_dir": str(tmp_path / "saves" / "lora"),
        "logging_steps": 1,
        "save_steps": 500,
        "plot_loss": True,
        "report_to": "none",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1.0e-4,
        "num_train_epochs": 1.0,
        "lr_scheduler_type": "cosine",
        "ddp_timeout": 180000000,
        "resume_from_checkpoint": None,
        "use_cpu": True,
    }
    ours = {"ignore_observation": True, "ignore_observation_token": "observation"}
    config = tmp_path / "my lora.yaml"
    config.write_text(yaml.safe_dump(stock | ours), encoding="utf-8")
    program = Path(sys.executable).with_name("llamafactory-patch-cli")
    result = subprocess.run(
        [program, "train", config], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    saved = tmp_path / "saves/lora"
    assert (saved / "adapter_model.safetensors").is_file()
    assert sorted(history(saved)) == [1, 2]
    roles = json.loads((saved / "data_statistics.json").read_text("utf-8"))["roles"]
    assert roles["observation"]["trained"] == 0 < roles["observation"]["tokens"]
