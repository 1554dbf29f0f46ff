import json
from pathlib import Path

import pytest
import yaml
from extras import needs
from typer.testing import CliRunner

from afm.errors import ConfigError
from afm.findings import Level, package_version
from afm.memory_arithmetic import Hardware, hardware_from
from afm.terminal import plural
from llamafactory_patch.checks import check_data, check_model
from llamafactory_patch.config import resolve
from llamafactory_patch.doctor import _engine_packages, diagnose

needs("llamafactory")

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPE = CONFIGS / "sft/mhqa_agent_qwen2.5_3b.yaml"


@pytest.fixture
def write_set(tmp_path):
    """Write the data set of the recipe; return its folder."""

    def write(name, text="", **info):
        if text:
            (tmp_path / name).write_text(text, encoding="utf-8")
        index = {"mhqa_agent_sft": info or {"file_name": name}}
        (tmp_path / "dataset_info.json").write_text(json.dumps(index), encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def data(write_set):
    rows = [{"instruction": "q", "input": "", "output": "word " * n} for n in (3, 3, 3, 5000)]
    return write_set("rows.json", json.dumps(rows))


def by_subject(findings):
    return {finding.subject: (finding.level, finding.text) for finding in findings}


def texts_of(findings, level):
    return [finding.text for finding in findings if finding.level == level]


def test_packages_for_gpus_are_a_warning_on_a_machine_without_one(monkeypatch, tmp_path):
    if package_version("liger-kernel"):
        pytest.skip("liger-kernel is installed")
    job = resolve(CONFIGS / "tiny/sft/math.yaml", ["enable_liger_kernel=true", f"output_dir={tmp_path}"])
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi there
    [here] = _engine_packages(job)
    assert (here.level, here.subject) == (Level.WARNING, "liger-kernel")
    assert "the machine with GPUs needs it; pip install liger-kernel" in here.text
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho GPU 0\n", encoding="utf-8")
    smi.chmod(0o755)
    [there] = _engine_packages(job)
    assert there.level is Level.ERROR


def test_a_sound_recipe_has_no_error(data):
    overrides = [
        f"dataset_dir={data}",
        f"output_dir={data}/out",
        "save_only_model=true",
        "save_total_limit=1",
    ]
    findings = diagnose(RECIPE, overrides, Hardware(), {})
    assert not [finding for finding in findings if finding.level == "error" and finding.subject != "disk"]
    found = by_subject(findings)
    assert found["engine"] == ("ok", "LLaMA-Factory accepts the arguments")
    assert found["data"] == ("ok", "rows.json: 4 rows to train on")
    steps = "1 per device x 16 accumulated x 8 = 128 sequences per step, about 4 steps (1 of warm-up)"
    assert found["batch"][1] == steps
    chosen = [finding.text for finding in findings if "(as configured)" in finding.text]
    assert chosen == ["ZeRO-3 (as configured): 16.2 GiB a GPU = states 7.6 + activations 1.4 + logits 7.2"]


def test_what_would_fail_is_an_error_that_says_why(data, tmp_path):
    (data / "rows.json").unlink()
    wrong = ["cutoff_len=40000", f"dataset_dir={data}", "use_swanlab=true", "deepspeed=nowhere.json"]
    env = {"SWANLAB_ROOT": str(tmp_path)}
    findings = diagnose(RECIPE, wrong, Hardware(), env)
    errors = {f.subject: f.text for f in findings if f.level == "error" and f.subject != "disk"}
    assert errors.keys() == {"trackers", "data", "context", "deepspeed"}
    assert f"{data}/rows.json is missing, but {data}/dataset_info.json lists it" in errors["data"]
    assert errors["context"].startswith("cutoff_len 40,000, the model has 32,768 positions")
    assert by_subject(diagnose(RECIPE, ["cutof_len=1"], Hardware(), {}))["keys"][0] == "error"


def test_rows_that_will_be_cut_and_uneven_steps_are_warnings(data, tiny):
    overrides = [f"model_name_or_path={tiny}", f"dataset_dir={data}", "cutoff_len=512"]
    overrides += ["template=qwen3_nothink", "save_strategy=steps", "save_steps=5", "logging_steps=2"]
    found = by_subject(diagnose(RECIPE, overrides, Hardware(), {}))
    assert found["lengths"][0] == "warning"
    assert found["lengths"][1].startswith("1 of 4 sampled rows are longer than cutoff_len=512")
    assert found["resume"][0] == "warning"
    foreign = by_subject(diagnose(RECIPE, [*overrides, "template=qwen"], Hardware(), {}))
    assert foreign["tokenizer"][0] == "error"
    assert "`template` renders a question as" in foreign["tokenizer"][1]


def test_lengths_are_what_the_trainer_would_get(write_set, tiny):
    """Only the prompt and the text of a record become tokens, not its calls and provenance."""
    record = {"instruction": "q", "input": "", "output": "a", "extra_info": {"unseen": "word " * 1000}}
    folder = write_set("rows.jsonl", json.dumps(record) + "\n")
    overrides = [f"model_name_or_path={tiny}", f"dataset_dir={folder}", "template=qwen3_nothink"]
    found = by_subject(diagnose(RECIPE, overrides, Hardware(), {}))
    longest = int(found["lengths"][1].split("(longest ")[1].split()[0])
    assert 5 < longest < 40


GOOD = '{"instruction": "q", "input": "", "output": "a"}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'[{GOOD},\n{{"instr', ":2: invalid JSON from here on"),
        (f'[{GOOD},\n{{"instruction": "q", "input": "", "output": "<observation>a"}}]', "never closed"),
    ],
)
def test_bad_rows_are_errors_that_name_file_and_line(write_set, text, message):
    found = diagnose(RECIPE, [f"dataset_dir={write_set('bad.json', text)}"], Hardware(), {})
    (error,) = (error for error in texts_of(found, "error") if "bad.json" in error)
    assert message in error


def test_data_that_only_llamafactory_can_read_is_told(write_set):
    folder = write_set("none", hf_hub_url="somebody/set")
    found = by_subject(diagnose(RECIPE, [f"dataset_dir={folder}"], Hardware(), {}))
    assert found["data"] == ("warning", "somebody/set: not in local JSON files, so the rows were not read")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("template=qwn", "got 'qwn', expected a template of LLaMA-Factory; did you mean 'qwen'?"),
        ("roles_without_loss=plann", "did you mean 'plan'?"),
        ("use_badam=true", "badam"),
    ],
)
def test_what_llamafactory_would_refuse_is_an_error(data, override, message):
    recipe = CONFIGS / "sft/web_agent_qwen2.5_7b.yaml"
    overrides = [f"dataset_dir={data}", "dataset=mhqa_agent_sft", "enable_liger_kernel=false", override]
    errors = texts_of(diagnose(recipe, overrides, Hardware(), {}), "error")
    assert any(message in error for error in errors), errors


def test_checkpoints_that_nobody_removes_are_counted(data):
    overrides = [f"dataset_dir={data}", "save_total_limit=", "save_strategy=steps", "save_steps=10"]
    many = by_subject(diagnose(RECIPE, [*overrides, "max_steps=400"], Hardware(), {}))
    assert "for the model and 40 checkpoints" in many["disk"][1]
    one = by_subject(diagnose(RECIPE, [*overrides, "max_steps=1"], Hardware(1, 1), {}))
    assert "for the model and 1 checkpoint," in one["disk"][1]
    assert one["batch"][1].endswith("x 1 = 16 sequences per step, about 1 step (1 of warm-up)")
    unknown = by_subject(diagnose(RECIPE, [*overrides, "dataset_dir=nowhere"], Hardware(), {}))
    assert unknown["disk"][0] == "warning"
    assert "set save_total_limit" in unknown["disk"][1]


def test_the_recipes_header_says_what_it_is_meant_for(tmp_path):
    recipe = CONFIGS / "sft/code_agent_qwen2.5_32b.yaml"
    assert hardware_from({}, recipe, None, None, None) == Hardware(2, 8, 80.0)
    assert hardware_from({"NNODES": "4"}, recipe, None, 2, 24.0) == Hardware(4, 2, 24.0)
    assert hardware_from({"NNODES": ""}, tmp_path / "none.yaml", None, None, None) == Hardware(1, 8, 80.0)
    for variable, value in (("NNODES", "0"), ("NPROC_PER_NODE", "1.5")):
        with pytest.raises(ConfigError, match=f"{variable}={value}: expected a positive whole number"):
            hardware_from({variable: value}, recipe, None, None, None)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("sft/*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_accepted_and_fits_on_the_hardware_it_names(path):
    findings = diagnose(path, [], hardware_from({}, path, None, None, None), {})
    memory = [f for f in findings if f.subject == "memory" and "(as configured)" in f.text]
    assert [finding.level for finding in memory] == ["ok"], memory
    assert by_subject(findings)["engine"] == ("ok", "LLaMA-Factory accepts the arguments")


def test_a_model_too_large_for_its_gpus_is_told_with_a_way_out(data):
    recipe = CONFIGS / "sft/code_agent_qwen2.5_32b.yaml"
    findings = diagnose(recipe, ["enable_liger_kernel=false"], Hardware(gpu_gib=80), {})
    (memory,) = texts_of([finding for finding in findings if finding.subject == "memory"], "warning")
    way_out = "try enable_liger_kernel=true, deepspeed=configs/deepspeed/zero3_offload.json"
    assert f"more than 73.6 GiB (92% of the 80 GiB of a GPU); {way_out}" in memory


def test_the_command_fails_when_the_training_would(data):
    from afm.cli.commands import app

    result = CliRunner().invoke(app, ["doctor", str(RECIPE), f"dataset_dir={data}/no"])
    assert result.exit_code == 1
    assert "dataset_info.json: no such file; `afm data prepare sft` writes it" in result.output
    published = CliRunner().invoke(app, ["doctor", str(CONFIGS / "sft/agent_flan_qwen2.5_7b.yaml")])
    assert (
        "; to make it: afm data download agent_flan --all --output-dir data/agent_flan/raw && "
        in published.output
    )


SAID = "<think>I look.</think><code>print(1)</code>\n<observation>1</observation>\n<answer>1</answer>"
ALPACA = {"instruction": "q", "input": ""}
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
SILENT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss": False}]
COLUMNS = {"prompt": "instruction", "query": "input", "chosen": "good", "rejected": "bad"}
RANKING = {"ranking": True, "columns": COLUMNS}
SETS = {
    "rows": ({}, [{**ALPACA, "output": SAID}] * 20),
    "pairs": (RANKING, [{**ALPACA, "good": SAID, "bad": bad} for bad in ("<answer>2</answer>", SAID)]),
    "silent": ({"formatting": "openai_messages"}, [{"messages": SILENT}] * 2),
    "one_unwritable": ({"formatting": "openai_messages"}, [CHAT, CHAT | {"tools": [{"unknown": 1}]}, CHAT]),
}


@pytest.fixture
def plain(configuration, tmp_path, tiny):
    """Diagnose a small training on data sets of every kind, with overrides."""
    index = {}
    for name, (info, rows) in SETS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        index[name] = {"file_name": f"{name}.jsonl", **info}
    (tmp_path / "dataset_info.json").write_text(json.dumps(index), "utf-8")
    config = tmp_path / "plain.yaml"
    small = {"cutoff_len": 256, "use_cpu": True, "save_only_model": True}
    small |= {"per_device_train_batch_size": 2, "num_train_epochs": 1}
    config.write_text(yaml.safe_dump(configuration(tiny, tmp_path, **small)), "utf-8")
    return lambda *overrides: diagnose(config, overrides, Hardware(), {})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stage=dpo"], "stage: got 'dpo', which trains on pairs"),
        (["roles_without_loss=[think, nope]"], "roles_without_loss: no row has <nope>"),
        (["dataset=silent"], "silent.jsonl:1 ('q'): nothing to train on: no token of the agent"),
        (["dataset=one_unwritable", "template=default"], "one_unwritable.jsonl:2 ('q'): the chat template"),
        (["dataset=pairs", "stage=dpo"], "pairs.jsonl:2 ('q'): the chosen and the rejected"),
        (["output_dir={folder}/rows.jsonl/x"], "rows.jsonl is a file, expected a folder"),
        (["val_size=20"], "val_size=20 reserves 20 of 20 rows"),
        (["deepspeed={folder}/list.json"], "list.json cannot be read as a JSON object"),
        (
            ["deepspeed=ds_z3.json"],
            "deepspeed: ds_z3.json: no such file; shipped: configs/deepspeed/zero2.json",
        ),
    ],
)
def test_what_a_training_would_refuse_is_an_error(plain, tmp_path, overrides, message):
    (tmp_path / "list.json").write_text("[1]")
    errors = texts_of(plain(*(override.format(folder=tmp_path) for override in overrides)), "error")
    assert any(message in error for error in errors), errors


def test_paths_that_lie_next_to_the_yaml_are_found_from_another_folder(
    configuration, tiny, tmp_path, monkeypatch
):
    task = tmp_path / "my task"
    (task / "runs/start").mkdir(parents=True)
    (task / "runs/dataset_info.json").write_text("{}")
    config = configuration(tiny, tmp_path, model_name_or_path="runs/start", dataset_dir="runs")
    (task / "sft.yaml").write_text(yaml.safe_dump(config), "utf-8")
    monkeypatch.chdir(tmp_path)
    job = resolve("my task/sft.yaml")
    for check, path in ((check_model, "runs/start"), (check_data, "runs/dataset_info.json")):
        with pytest.raises(ConfigError) as caught:
            check(job)
        advice = f"; my task/{path} exists: cd 'my task' and run the command there with sft.yaml"
        assert str(caught.value).endswith(advice)
    monkeypatch.chdir(task)
    check_model(resolve("sft.yaml"))


def test_rows_without_a_trained_token_are_one_error(plain):
    [error] = texts_of(plain("dataset=silent"), "error")
    assert error.startswith("no sampled row can be trained on: 2 bad rows in the sample, ")
    assert "silent.jsonl:2 ('q'): nothing to train on: no token of the agent is left" in error


@pytest.mark.parametrize(
    ("overrides", "level", "reported"),
    [
        (["dataloader_drop_last=true", "per_device_train_batch_size=21"], "error", "0 updates: dataloader_drop_last drops"),
        (["max_steps=0"], "warning", "max_steps=0 does not end the run: num_train_epochs decides; remove it"),
        (["max_steps=4", "warmup_steps=4"], "warning", "4 of 4 steps are warm-up, so the learning rate never reaches"),
        (["max_steps=4", "warmup_steps=3"], "warning", None),
        (["dataloader_drop_last=true", "per_device_train_batch_size=20"], "error", None),
    ],
)  # fmt: skip
def test_a_schedule_that_trains_nothing_or_too_little_is_reported(plain, overrides, level, reported):
    texts = texts_of([finding for finding in plain(*overrides) if finding.subject == "steps"], level)
    assert [text.startswith(reported) for text in texts] == ([True] if reported else [])


def test_a_row_that_training_would_drop_is_a_warning(plain):
    findings = plain("dataset=one_unwritable", "template=default", "on_bad_rows=drop")
    assert not texts_of(findings, "error")
    (warning,) = texts_of([finding for finding in findings if finding.subject == "data"], "warning")
    assert warning.startswith("1 bad row in the sample, ")
    assert "one_unwritable.jsonl:2 ('q'): the chat template cannot write it: " in warning


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["eval_dataset=rows"], "about 10 steps (0"),
        (["val_size=3"], "about 9 steps (0"),
        (["max_samples=4"], "about 2 steps (0"),
        (["warmup_ratio=0.25"], "about 10 steps (3 of warm-up)"),
        (["gradient_accumulation_steps=4", "num_train_epochs=2.5"], "about 8 steps (0"),
    ],
)
def test_steps_are_counted_as_the_trainer_counts_them(plain, overrides, steps):
    """20 rows, two per step; an epoch with an incomplete step is rounded up before the multiplication."""
    assert by_subject(plain(*overrides))["batch"][1].partition(", ")[2].startswith(steps)


def test_packs_are_counted_instead_of_rows(plain):
    """Equal rows fill packs completely."""
    longest = int(by_subject(plain())["lengths"][1].split("(longest ")[1].split()[0])
    packs = -(-20 // (1000 // longest))
    found = by_subject(plain("packing=true", "cutoff_len=1000", "per_device_train_batch_size=1"))
    assert f"about {plural(packs, 'step')} (" in found["batch"][1]


def test_a_check_of_a_sample_stores_nothing_and_prints_nothing(plain, tmp_path, capfd):
    before = set(tmp_path.rglob("*"))
    plain("tokenized_path=" + str(tmp_path / "stored"), "preprocessing_num_workers=2")
    assert set(tmp_path.rglob("*")) == before
    assert "examples/s" not in "".join(capfd.readouterr())
