"""Exit statuses and messages of ``afm rl``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from extras import needs

from afm.agents import load_agent
from afm.datasets import Task
from afm.datasets.rl_files import write_rl
from afm.errors import ConfigError
from afm.findings import Level
from verl_ext.command import ensure_ray_token
from verl_ext.doctor import start_findings
from verl_ext.launcher import run_rl
from verl_ext.settings import load_settings

needs("verl")

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "configs/tiny/rl/math.yaml")


Words = Callable[[str], list[str]]
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def tiny(tmp_path: Path) -> Words:
    """Return the overrides of a run on one row of a data source, whose model has a shape."""

    def words(source: str) -> list[str]:
        (tmp_path / "model").mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (tmp_path / "model" / name).write_text(json.dumps(SHAPE if name == "config.json" else {}))
        task = Task(id="1", question="1 + 1?", ground_truth="2", data_source=source)
        write_rl([task], load_agent("math"), tmp_path / "rows.parquet")
        rows = [f"{key}=[{tmp_path}/rows.parquet]" for key in ("train_files", "val_files")]
        return [*rows, f"model={tmp_path}/model", f"output_dir={tmp_path}/out"]

    return words


def test_a_dry_run_of_a_run_that_has_what_it_needs_ends_well(
    tmp_path: Path, capsys: Any, tiny: Words
) -> None:
    assert run_rl(TINY, tiny("math_dapo"), dry_run=True) == 0
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("/absent/model", True),
        ("models/typo_7b", True),
        ("runs/typo", True),
        ("./typo", True),
        ("~/model", True),  # verl looks for it on the hub, even if it is there
        ("Qwen/Qwen2.5-7B", False),
        ("hdfs://host/model", False),
    ],
)
def test_a_gpu_recipe_misses_a_folder_that_is_no_name_on_the_hub(
    model: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    settings = load_settings(ROOT / "configs/rl/web_dapo_7b.yaml", [f"model={model}"])
    errors = [finding.text for finding in start_findings(settings, here=True) if finding.level is Level.ERROR]
    message = f"{model}: no such folder; expected a model's folder, or ORGANISATION/NAME on the hub (model)"
    assert (message in errors) is named
    elsewhere = start_findings(settings, here=False)
    assert not any(finding.level is Level.ERROR and finding.subject == "model" for finding in elsewhere)
    [warned] = [finding.text for finding in elsewhere if finding.subject == "model"]
    assert (
        "it must be on the training machine" if named else "look for it on the Hugging Face hub"
    ) in warned


def test_what_a_recipe_misses_comes_with_the_commands_that_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = load_settings(ROOT / "configs/rl/code_dapo_7b.yaml", ["val_files=runs/own.parquet"])
    texts = [finding.text for finding in start_findings(settings, here=True)]
    train = next(text for text in texts if text.startswith("data/code_agent/rl/train.parquet: no such file"))
    assert train.endswith(
        "; to make it: afm data download code_agent --output-dir data/code_agent/raw && data/code_agent/prepare.sh"
    )
    model = next(text for text in texts if text.startswith("models/code_agent_7b_sft: no such folder"))
    assert model.endswith(": afm data download models --output-dir models --only code_agent_7b_sft")
    assert any(text.endswith("own.parquet: no such file (train_files, val_files)") for text in texts)


def test_a_dry_run_finds_what_the_doctor_finds(capsys: Any, tiny: Words) -> None:
    words = tiny("math_dapo")
    critic = ["verl.critic.optim.lr=1e-3", "verl.critic.ppo_micro_batch_size_per_gpu=8"]
    assert run_rl(TINY, [*words, *critic], dry_run=True) == 0
    assert capsys.readouterr().err == (
        "warning: verl.critic.optim.lr and 1 other key of the critic: is ignored, as grpo trains no critic; leave it out, "
        "or set verl.algorithm.adv_estimator=gae\n"
    )
    with pytest.raises(
        ConfigError, match=r"sequences need 9,160 positions, the model has 4,096: .*; lower data"
    ):
        run_rl(TINY, [*words, "verl.data.max_prompt_length=9000"], dry_run=True)
    with pytest.raises(
        ConfigError, match=r"^8 nodes, but ray_address is not set: .*; verl.*per_gpu is 32; exp"
    ):
        run_rl(TINY, [*words, "verl.trainer.nnodes=8"], dry_run=True)
    with pytest.raises(ConfigError, match=r"; gae trains a critic: .*configs/tiny/rl/mhqa_ppo.yaml does"):
        run_rl(TINY, [*words, "verl.algorithm.adv_estimator=gae"], dry_run=True)


@pytest.mark.parametrize(("source", "warned"), [("search", True), ("math_dapo", False)])
def test_a_judge_on_the_loopback_matters_only_to_rows_that_need_it(
    source: str, warned: bool, capsys: Any, tiny: Words
) -> None:
    several = [
        "verl.trainer.nnodes=2",
        "ray_address=10.0.0.1:6379",
        "rewards.judge.url=http://127.0.0.1:1/v1",
    ]
    sizes = ["verl.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16"]
    sizes += ["verl.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32"]
    assert run_rl(TINY, [*tiny(source), *several, *sizes], dry_run=True) == 0
    assert ("judge: http://127.0.0.1:1/v1 is another server" in capsys.readouterr().err) is warned


def test_a_dry_run_warns_of_what_may_be_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    recipe, judge = ROOT / "configs/rl/code_dapo_7b.yaml", "rewards.judge.url=http://127.0.0.1:1/v1"
    assert run_rl(recipe, ["model=Qwen/typo", "verl.trainer.nnodes=8", judge], dry_run=True) == 1
    errors = capsys.readouterr().err
    assert "warning: 8 nodes, but ray_address is not set" in errors
    assert "warning: judge: http://127.0.0.1:1/v1 is another server on each of the 8 nodes" in errors
    assert "warning: Qwen/typo: no such folder here; verl would look for it on the Hugging Face hub" in errors
    assert run_rl(recipe, ["model=models/typo_7b", "ray_address=10.0.0.1:6379"], dry_run=True) == 1
    errors = capsys.readouterr().err
    assert "ray_address" not in errors
    assert "error: this would not start: models/typo_7b: no such folder; expected a model's folder" in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "status", "message"),
    [
        ("sed=1", 2, "override 'sed=1': sed: unknown key; did you mean 'seed'?"),
        ("train_files=absent.parquet", 1, "absent.parquet: no such file (train_files"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    tmp_path: Path, override: str, status: int, message: str
) -> None:
    words = [sys.executable, "-m", "afm.cli.main", "rl", TINY, override]
    result = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs" / "tiny" / "rl" / "training.log").exists()


def test_first_starts_at_the_same_moment_share_one_token_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / ".ray/auth_token"
    monkeypatch.setenv("HOME", str(tmp_path))
    together = Barrier(8)

    def start() -> str:
        together.wait()
        ensure_ray_token()
        return file.read_text()

    with ThreadPoolExecutor(8) as pool:
        [token] = {future.result() for future in [pool.submit(start) for _ in range(8)]}
    assert len(bytes.fromhex(token)) == 32
    assert (file.stat().st_mode & 0o777, [*file.parent.iterdir()]) == (0o600, [file])
    ensure_ray_token()
    assert file.read_text() == token


def test_no_token_is_written_where_ray_uses_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, value in [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN_PATH", "/absent")]:
        with monkeypatch.context() as own:
            own.setenv(variable, value)
            ensure_ray_token()
    assert not (tmp_path / ".ray").exists()
