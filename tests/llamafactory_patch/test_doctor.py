import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamafactory_patch.doctor import Hardware, diagnose

pytest.importorskip("llamafactory")

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPE = CONFIGS / "sft/mhqa_agent_qwen2.5_3b.yaml"


@pytest.fixture
def data(tmp_path):
    rows = [{"instruction": "q", "input": "", "output": "word " * n} for n in (3, 3, 3, 5000)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    index = {"mhqa_agent_sft": {"file_name": "rows.json"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(index), encoding="utf-8")
    return tmp_path


def by_subject(findings):
    return {finding.subject: (finding.level, finding.text) for finding in findings}


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
    assert found["data"] == ("ok", "4 rows")
    assert (
        found["batch"][1]
        == "1 a device x 16 accumulated x 8 = 128 sequences a step, about 1 steps (0 of warm-up)"
    )
    chosen = [finding.text for finding in findings if "(as configured)" in finding.text]
    assert chosen == ["ZeRO-3 (as configured): 16.2 GiB a GPU = states 7.6 + activations 1.4 + logits 7.2"]


def test_what_would_fail_is_an_error_that_says_why(data, tmp_path):
    (data / "rows.json").unlink()
    wrong = ["cutoff_len=40000", f"dataset_dir={data}", "use_swanlab=true", "deepspeed=nowhere.json"]
    env = {"SWANLAB_ROOT": str(tmp_path)}
    errors = {
        (finding.subject, finding.text.split(";")[0])
        for finding in diagnose(RECIPE, wrong, Hardware(), env)
        if finding.level == "error" and finding.subject != "disk"
    }
    assert {subject for subject, _ in errors} == {"trackers", "data", "context", "deepspeed"}
    assert ("context", "cutoff_len 40,000 against 32,768 positions of the model") in errors
    assert by_subject(diagnose(RECIPE, ["cutof_len=1"], Hardware(), {}))["keys"][0] == "error"


def test_rows_that_will_be_cut_and_uneven_steps_are_warnings(data, tiny):
    overrides = [f"model_name_or_path={tiny}", f"dataset_dir={data}", "cutoff_len=512"]
    overrides += ["save_strategy=steps", "save_steps=5", "logging_steps=2"]
    found = by_subject(diagnose(RECIPE, overrides, Hardware(), {}))
    assert found["lengths"][0] == "warning"
    assert found["lengths"][1].startswith("1 of 4 sampled rows are longer than cutoff_len=512")
    assert found["resume"][0] == "warning"


def test_a_model_too_large_for_its_gpus_is_told_with_a_way_out(data):
    recipe = CONFIGS / "sft/web_agent_qwen2.5_32b.yaml"
    memory = [
        f
        for f in diagnose(recipe, [], Hardware(gpu_gib=80), {})
        if f.level == "warning" and f.subject == "memory"
    ]
    assert len(memory) == 1
    assert (
        "more than 80; try enable_liger_kernel=true, deepspeed=configs/deepspeed/zero3_offload.json"
        in memory[0].text
    )


def test_the_command_fails_when_the_training_would(data, monkeypatch):
    from afm.cli.main import app

    result = CliRunner().invoke(app, ["doctor", str(RECIPE), f"dataset_dir={data}/no"])
    assert result.exit_code == 1
    assert "dataset_info.json is missing" in result.output
    environment = CliRunner().invoke(app, ["doctor"])
    assert environment.exit_code == 0
    assert "llamafactory 0.9.5" in environment.output
