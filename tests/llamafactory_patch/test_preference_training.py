"""Real steps of DPO and KTO: what the trainer sums is the log-probability of the agent's tokens alone."""

import json
import math
import subprocess
import sys

import pytest
import yaml

pytest.importorskip("llamafactory")
pytestmark = pytest.mark.slow

CALL = "<think>Use the tool.</think><code>print(17+25)</code>"
TRAIN = """
import sys, yaml
from llamafactory_patch import install
install()
from llamafactory.train.tuner import run_exp
for file in sys.argv[1:]:
    run_exp(yaml.safe_load(open(file)))
"""
PAIR = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
KTO = {"prompt": "instruction", "query": "input", "response": "output", "kto_tag": "good"}


def response(number, *, good):
    """The tool's text is long and differs between the two: summed by mistake, it would show."""
    seen = f"\n<observation>\n{number if good else 'no such thing ' * 5}\n</observation>\n"
    return f"{CALL}{seen}<answer>{number if good else 'unknown'}</answer>"


def preference_rows():
    rows = [
        {"instruction": f"What is {n}?", "input": "", "chosen": good, "rejected": bad}
        for n in range(8)
        for good, bad in [(response(n, good=True), response(n, good=False))]
    ]
    return rows, {"ranking": True, "columns": PAIR}


def feedback_rows():
    rows = [
        {
            "instruction": f"What is {n}?",
            "input": "",
            "output": response(n, good=n % 2 == 0),
            "good": n % 2 == 0,
        }
        for n in range(8)
    ]
    return rows, {"columns": KTO}


def agent_logprob(model_dir, ids, labels):
    """Sum of the log-probabilities of the labelled tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return sum(logprobs[at, label].item() for at, label in enumerate(labels[1:]) if label != -100)


def test_preference_trainings_take_the_agents_tokens_alone(pipeline, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    built, configs = {}, []
    for stage, (rows, info) in {"dpo": preference_rows(), "kto": feedback_rows()}.items():
        folder = tmp_path / stage
        folder.mkdir()
        (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        entry = {"rows": {"file_name": "rows.json", **info}}
        (folder / "dataset_info.json").write_text(json.dumps(entry), encoding="utf-8")
        built[stage] = pipeline(tiny, folder, stage=stage).rows
        configs.append(write_config(folder, tiny, stage))
    command = [sys.executable, "-c", TRAIN, *configs]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]

    first, *_, last = logged(tmp_path / "dpo")
    for side in ("chosen", "rejected"):
        sums = [agent_logprob(tiny, row[f"{side}_input_ids"], row[f"{side}_labels"]) for row in built["dpo"]]
        assert first[f"logps/{side}"] == pytest.approx(sum(sums) / len(sums), rel=1e-4)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)  # policy and reference are the same model
    assert last["loss"] < 0.5
    assert last["rewards/margins"] > 0.3

    first, *_, last = logged(tmp_path / "kto")
    for side, wanted in (("chosen", True), ("rejected", False)):
        rows = [row for row in built["kto"] if row["kto_tags"] is wanted]
        sums = [agent_logprob(tiny, row["input_ids"], row["labels"]) for row in rows]
        assert first[f"logps/{side}"] == pytest.approx(sum(sums) / len(sums), rel=1e-4)
    assert first["loss"] == pytest.approx(0.5, abs=1e-4)
    assert last["loss"] < 0.45


def write_config(folder, tiny, stage):
    """Six steps over all rows at once."""
    config = {
        "model_name_or_path": str(tiny),
        "stage": stage,
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "rows",
        "dataset_dir": str(folder),
        "template": "qwen3_nothink",
        "cutoff_len": 512,
        "ignore_observation": True,
        "output_dir": str(folder / "out"),
        "max_steps": 6,
        "save_steps": 6,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "per_device_train_batch_size": 8,
        "disable_shuffling": True,
        "report_to": "none",
        "use_cpu": True,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def logged(folder):
    state = json.loads((folder / "out/checkpoint-6/trainer_state.json").read_text("utf-8"))
    return [entry for entry in state["log_history"] if "loss" in entry]
