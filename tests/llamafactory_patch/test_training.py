"""Real runs with a few steps of a tiny model on the CPU."""

import importlib.util
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from extras import needs
from loopback import OWN_HOST, free_port
from sft_rows import CALL, FEEDBACK, PAIRS, alpaca, pairs

from afm.agents import agent_of_model, load_agent
from afm.errors import ConfigError
from llamafactory_patch.config import resolve
from llamafactory_patch.launcher import run_sft

needs("llamafactory")
pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[2] / "configs/tiny/sft/math.yaml"
SMALL = {"max_steps": 5, "warmup_steps": 1, "logging_steps": 1, "cutoff_len": 256}
SMALL |= {"per_device_train_batch_size": 4}


@pytest.fixture(scope="module", autouse=True)
def environment():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}.items():
            patch.setenv(name, value)
        patch.setenv("LLAMAFACTORY_VERBOSITY", "INFO")
        yield


def write_sets(folder, sets):
    """Write data sets by name: their rows, and further keys for the index."""
    for name, (rows, _) in sets.items():
        (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    index = {name: {"file_name": f"{name}.json", **info} for name, (_, info) in sets.items()}
    (folder / "dataset_info.json").write_text(json.dumps(index), encoding="utf-8")


@pytest.fixture(scope="module")
def arguments(tiny, tmp_path_factory):
    """Return overrides of the tiny recipe for a small data set; folder names contain a blank."""
    folder = tmp_path_factory.mktemp("my trainings")
    outputs = [f"{CALL}\n<observation>\n{n}\n</observation>\n<answer>{n}</answer>" for n in range(64)]
    write_sets(folder, {"rows": (alpaca(*outputs), {}), "broken": (alpaca("b</observation>"), {})})

    def make(name, **more):
        places = {"model_name_or_path": tiny, "dataset_dir": folder, "output_dir": folder / name}
        options = {"dataset": "rows", **places, **SMALL, **more}
        return [f"{key}={value}" for key, value in options.items()]

    make.folder = folder
    return make


LAUNCHER = [sys.executable, "-m", "llamafactory_patch.launcher", str(CONFIG)]
LENGTH = {"max_steps": 30, "save_steps": 3, "save_total_limit": 2, "seed": 3}


@pytest.fixture(scope="module")
def whole(arguments):
    """Run an uninterrupted training with all trackers."""
    trackers = {"report_to": "[tensorboard,wandb]", "use_swanlab": True, "swanlab_mode": "offline"}
    assert run_sft(CONFIG, arguments("whole", plot_loss=True, **LENGTH, **trackers), echo=False) == 0
    return arguments.folder / "whole"


def history(folder):
    lines = (folder / "trainer_log.jsonl").read_text("utf-8").splitlines()
    return {entry["current_steps"]: entry["loss"] for entry in map(json.loads, lines) if "loss" in entry}


def test_a_training_leaves_a_complete_model_and_its_story(arguments, whole, capsys):
    log = (whole / "training.log").read_text("utf-8")
    assert "train_loss" in log
    assert log.index("training data: 64 sequences") < log.index("--- sequence 33") < log.index("'loss'")
    check_masked(whole, trained="code")
    check_trackers(whole)
    losses = history(whole)
    assert list(losses) == list(range(1, 31))
    assert losses[30] < losses[1]
    assert agent_of_model(whole, "math") == load_agent(CONFIG.parents[1] / "agents/math.yaml")
    assert json.loads((whole / "config.json").read_text("utf-8"))["use_cache"] is True
    assert json.loads((whole / "sft_manifest.json").read_text("utf-8"))["versions"]["llamafactory"] == "0.9.5"

    before = (whole / "model.safetensors").stat().st_mtime_ns
    assert run_sft(CONFIG, arguments("whole", **LENGTH)) == 0
    assert "is finished" in capsys.readouterr().out
    assert (whole / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="max_steps: 30 -> 6"):
        run_sft(CONFIG, arguments("whole", **LENGTH | {"max_steps": 6}))


def check_masked(folder, trained):
    """Check that observations are masked and a role of the agent is trained on."""
    roles = json.loads((folder / "data_statistics.json").read_text("utf-8"))["roles"]
    assert roles["observation"]["trained"] == 0 < roles["observation"]["tokens"]
    assert roles[trained]["trained"] == roles[trained]["tokens"] > 0


def check_trackers(target):
    """Check that every tracker stored the losses without network."""
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
    """Every step has the same rows: a batch of 4 in one process equals batches of 2 in two processes."""
    assert run_sft(CONFIG, arguments("alone", disable_shuffling=True), echo=False) == 0
    alone = history(arguments.folder / "alone")

    monkeypatch.setenv("MASTER_ADDR", OWN_HOST)
    nodes = arguments.folder / "nodes"
    halves = {"disable_shuffling": True, "per_device_train_batch_size": 2}
    job = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_PORT": str(free_port())}
    command = [*LAUNCHER, *arguments("nodes", **halves)]
    env = {**os.environ, **job, "PYTHONPATH": os.pathsep.join(sys.path)}
    quiet = {"stdout": subprocess.DEVNULL}
    both = [subprocess.Popen(command, env={**env, "NODE_RANK": rank}, **quiet) for rank in "10"]
    assert [process.wait() for process in both] == [0, 0], (nodes / "training.log").read_text("utf-8")[-2000:]
    assert "Multi-node training enabled" in (nodes / "training.node1.log").read_text("utf-8")
    assert history(nodes) == pytest.approx(alone, rel=1e-3)

    monkeypatch.setenv("NPROC_PER_NODE", "2")
    sharded = arguments.folder / "fsdp2"
    fsdp2 = CONFIG.parents[2] / "fsdp/fsdp2.json"
    assert run_sft(CONFIG, arguments("fsdp2", fsdp_config=fsdp2, **halves), echo=False) == 0
    assert "You are using fsdp2" in (sharded / "training.log").read_text("utf-8")
    assert history(sharded) == pytest.approx(alone, rel=1e-3)
    assert (sharded / "model.safetensors").stat().st_size == (nodes / "model.safetensors").stat().st_size


@pytest.mark.proof
def test_the_gpu_recipe_trains_under_zero3_on_two_processes(arguments, monkeypatch):
    pytest.importorskip("deepspeed")
    if shutil.which("g++") is None:
        pytest.skip("DeepSpeed compiles its CPU optimizer; install g++")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(arguments.folder / "extensions"))
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    recipe = CONFIG.parents[2] / "sft/code_agent_qwen2.5_7b.yaml"
    small = {"bf16": False, "template": "qwen3_nothink", "preprocessing_num_workers": 2}
    small |= {"enable_liger_kernel": False, "disable_shuffling": True, "max_steps": 2}
    small |= {"learning_rate": 0.01, "warmup_steps": 0}
    target, alone = arguments.folder / "zero3", arguments.folder / "zero3_alone"
    assert run_sft(recipe, arguments("zero3", **small), echo=False) == 0
    log = (target / "training.log").read_text("utf-8")
    assert "Initializing 2 distributed tasks" in log
    assert "DeepSpeed ZeRO3 detected" in log
    assert sorted(history(target)) == [1, 2]
    assert agent_of_model(target, "code") == load_agent("code")
    assert (target / "model.safetensors").stat().st_size > 50_000

    one = {**small, "deepspeed": "", "use_cpu": True, "per_device_train_batch_size": 8}
    assert run_sft(recipe, arguments("zero3_alone", **one), echo=False) == 0
    assert history(target) == pytest.approx(history(alone), rel=1e-3)
    assert history(alone)[2] < history(alone)[1] * 0.99


TRAIN = """
import sys, yaml
from llamafactory_patch.engine import load_engine, mend_trainer
from llamafactory_patch.launcher import stock_training
load_engine()
mend_trainer()
from llamafactory.train.tuner import run_exp
for file in [stock_training([file]) for file in sys.argv[1:]]:
    run_exp(yaml.safe_load(file.read_text("utf-8")))
"""
"""Tokenises for all runs before the first begins: it forks, and would inherit locks that SwanLab's threads hold."""
TWINS = ("web_agent", "mhqa_agent_lora", "code_agent")
STOCK = yaml.safe_load("""
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
dataset: code_agent_sft
template: qwen3_nothink
cutoff_len: 512
max_samples: 16
logging_steps: 1
plot_loss: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 1.0
ddp_timeout: 180000000
resume_from_checkpoint: null
use_cpu: true
ignore_observation: true
ignore_observation_token: observation
""")
"""A LoRA run as users of LLaMA-Factory write it, with the two keys of our command."""
PREFERENCE = {"finetuning_type": "full", "max_steps": 6, "save_steps": 6, "learning_rate": 0.01}
PREFERENCE |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
PREFERENCE |= {"lr_scheduler_type": "linear", "disable_shuffling": True}
"""Six steps, each over all rows."""


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """Train DPO, KTO, LoRA and the tiny twins of the recipes in one process, because the start takes longer than the steps."""
    folder = tmp_path_factory.mktemp("trained")
    both = [(response(n, good=True), response(n, good=False)) for n in range(8)]
    rows = alpaca(*(pair[n % 2] for n, pair in enumerate(both)))
    feedback = [{**row, "good": n % 2 == 0} for n, row in enumerate(rows)]
    sets = {"dpo": (pairs(*both), PAIRS), "kto": (feedback, FEEDBACK)}
    for agent in ("web", "mhqa", "code"):
        rows = [twin_row(load_agent(agent), number) for number in range(16)]
        sets[f"{agent}_agent_sft"] = (rows, {})
    write_sets(folder, sets)
    places = {"model_name_or_path": str(tiny), "dataset_dir": str(folder)}
    runs = {stage: STOCK | PREFERENCE | {"stage": stage, "dataset": stage} for stage in ("dpo", "kto")}
    swanlab = {"use_swanlab": True, "swanlab_mode": "local", "swanlab_project": "local"}
    swanlab |= {"swanlab_logdir": str(folder / "lora/swanlab")}
    runs["lora"] = STOCK | (swanlab if importlib.util.find_spec("swanboard") else {})
    runs |= {twin: resolve(CONFIG.parent / f"{twin}.yaml", ["max_steps=2"]).config for twin in TWINS}
    configs = [folder / f"my {name}.yaml" for name in runs]
    for path, (name, config) in zip(configs, runs.items(), strict=True):
        path.write_text(yaml.safe_dump(config | places | {"output_dir": str(folder / name)}), "utf-8")
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAIN, *configs]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 0, result.stderr[-2000:]
    return folder


def test_the_tiny_twins_train(trained):
    """One twin per agent, with full weights or adapters."""
    for twin in TWINS:
        folder = trained / twin
        assert sorted(history(folder)) == [1, 2]
        kind = "adapter_model" if twin.endswith("_lora") else "model"
        assert (folder / "checkpoint-2" / f"{kind}.safetensors").is_file()
        check_masked(folder, trained="answer")


def twin_row(agent, number):
    """Return a trajectory with a call of the agent's first tool."""
    tool, seen, answer = next(iter(agent.tool_roles)), agent.observation_role, agent.answer_role
    text = f"<{tool}>{number}</{tool}>\n<{seen}>\n{number}\n</{seen}>\n<{answer}>{number}</{answer}>"
    return {"instruction": agent.user_message(f"What is {number}?"), "input": "", "output": text}


def response(number, *, good):
    """Return a response; the tool's text is long and differs between good and bad, so a wrong sum would show."""
    seen = f"\n<observation>\n{number if good else 'no such thing ' * 5}\n</observation>\n"
    return f"{CALL}{seen}<answer>{number if good else 'unknown'}</answer>"


def agent_logprob(model_dir, ids, labels):
    """Return the sum of the log-probabilities of the labelled tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return sum(logprobs[at, label].item() for at, label in enumerate(labels[1:]) if label != -100)


def test_preference_trainings_take_the_agents_tokens_alone(trained, tiny):
    """The trainers of DPO and KTO sum only the log-probabilities of the agent's tokens."""
    from datasets import load_from_disk

    def built(stage):
        return list(load_from_disk(str(trained / f"{stage}/tokenized"))["train"])

    first, *_, last = logged(trained / "dpo")
    for side in ("chosen", "rejected"):
        sums = [agent_logprob(tiny, row[f"{side}_input_ids"], row[f"{side}_labels"]) for row in built("dpo")]
        assert first[f"logps/{side}"] == pytest.approx(sum(sums) / len(sums), rel=1e-4)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)  # policy and reference are the same model
    assert last["loss"] < 0.5
    assert last["rewards/margins"] > 0.3

    first, *_, last = logged(trained / "kto")
    for side, wanted in (("chosen", True), ("rejected", False)):
        rows = [row for row in built("kto") if row["kto_tags"] is wanted]
        sums = [agent_logprob(tiny, row["input_ids"], row["labels"]) for row in rows]
        assert first[f"logps/{side}"] == pytest.approx(sum(sums) / len(sums), rel=1e-4)
    assert first["loss"] == pytest.approx(0.5, abs=1e-4)
    assert last["loss"] < 0.45


def logged(folder):
    state = json.loads((folder / "checkpoint-6/trainer_state.json").read_text("utf-8"))
    return [entry for entry in state["log_history"] if "loss" in entry]


def swanlab_losses(folder):
    """Read losses by step as `swanlab watch` does: from a table of names and a log per name."""
    with closing(sqlite3.connect(folder / "runs.swanlab")) as database:
        ((number,),) = database.execute("SELECT folder FROM tag WHERE name = 'train/loss'")
    (log,) = folder.glob(f"run-*/logs/{number}/*.log")
    entries = map(json.loads, log.read_text("utf-8").splitlines())
    return {entry["index"]: entry["data"] for entry in entries}


def test_a_broken_row_ends_the_training_with_one_clear_line(arguments, capfd):
    assert run_sft(CONFIG, arguments("broken", dataset="broken"), echo=False) == 1
    target = arguments.folder / "broken"
    last = (target / "training.log").read_text("utf-8").splitlines()[-1]
    file = arguments.folder / "broken.json"
    expected = f"error: {file}:1, row 1 ('Question 0?'): </observation> at character 1 closes nothing"
    assert last == expected
    printed = capfd.readouterr()
    assert printed.err == f"{expected}\n"
    begin = "loading the rows and the model; the first step follows in about a minute"
    assert printed.out == f"{begin}. Log: {target}/training.log\n"
    assert not (target / "agent.yaml").exists()


def test_a_killed_training_ends_with_the_same_bits_as_one_that_was_not(arguments, whole, capsys):
    """`kill -9` the caller after the first checkpoint; the next start continues from there."""
    target = arguments.folder / "killed"
    command = [*LAUNCHER, *arguments("killed", **LENGTH)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    caller = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not list(target.glob("checkpoint-*/trainer_state.json")):
        assert caller.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    assert not (target / "train_results.json").exists()

    assert run_sft(CONFIG, arguments("killed", **LENGTH)) == 0
    assert "continuing from" in capsys.readouterr().out
    assert history(target) == history(whole)
    assert (target / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_training_killed_behind_its_last_step_ends_there(arguments, whole):
    """Such a kill leaves all checkpoints, but no model and no mark."""
    target = arguments.folder / "saving"
    shutil.copytree(whole, target)
    (target / "model.safetensors").unlink()
    manifest = json.loads((target / "sft_manifest.json").read_text("utf-8"))
    (target / "sft_manifest.json").write_text(json.dumps(manifest | {"finished": None}), encoding="utf-8")
    assert run_sft(CONFIG, arguments("saving", **LENGTH), echo=False) == 0
    assert history(target) == history(whole)
    assert (target / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_stock_configuration_needs_two_keys_more(trained):
    saved = trained / "lora"
    assert (saved / "adapter_model.safetensors").is_file()
    assert sorted(history(saved)) == [1, 2]
    check_masked(saved, trained="answer")
    if importlib.util.find_spec("swanboard"):
        assert swanlab_losses(saved / "swanlab") == pytest.approx(history(saved))


def test_a_training_that_ctrl_c_stops_says_how_to_go_on(arguments):
    source = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from llamafactory_patch.launcher import run_sft; sys.exit(run_sft(sys.argv[1], sys.argv[2:], echo=False))"
    )
    words = [sys.executable, "-c", source, str(CONFIG), *arguments("stopped", max_steps=100_000)]
    log = arguments.folder / "stopped/trainer_log.jsonl"
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as training:
        while training.poll() is None and not log.exists():
            time.sleep(0.1)
        training.send_signal(signal.SIGINT)
        _, printed = training.communicate()
    assert training.returncode == 130
    assert printed.splitlines()[-1] == "stopped; run the same command again to resume"
    assert "ended with status" not in printed
