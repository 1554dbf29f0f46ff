"""Every RL script and configuration resolves to a command that verl accepts, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from verl_ext.plan import command
from verl_ext.settings import load_settings

pytest.importorskip("verl")

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "rl").glob("*.yaml")) + sorted((ROOT / "configs/tiny/rl").glob("*.yaml"))
SCRIPTS = sorted((ROOT / "train").glob("*/rl/*.sh"))


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def dry_run(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(script), "--dry-run", *arguments],
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"PATH": path, **variables},
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_every_configuration_composes(path: Path) -> None:
    settings = load_settings(path)
    _, config = command(settings, "/tmp/ray")
    assert config.data.max_response_length == settings.spec().limits.max_response_tokens
    assert config.trainer.save_freq > 0
    head = path.read_text().split("\nagent:")[0].split("\nextends:")[0]
    assert "Hardware:" in head
    assert "Expected:" in head


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_resolves_from_any_folder(script: Path) -> None:
    result = dry_run(script, "seed=3", "output_dir=/tmp/a run", MODEL="some/model")
    assert result.returncode == 0, result.stderr
    assert "-m verl.trainer.main_ppo" in result.stdout
    assert "actor_rollout_ref.model.path=some/model" in result.stdout
    assert "data.seed=3" in result.stdout
    assert "verl accepts this configuration" in result.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_says_how_to_set_what_is_missing(script: Path) -> None:
    result = dry_run(script, MODEL="")
    assert result.returncode == 1
    assert "set it to the folder of the SFT model, for example MODEL=" in result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_is_short_strict_and_shows_an_example(script: Path) -> None:
    lines = script.read_text().splitlines()
    assert len(lines) < 40
    assert "set -euo pipefail" in lines
    assert any(line.startswith("# Usage:") for line in lines)
    assert lines[-1].startswith("exec ")
    subprocess.run([str(Path(sys.executable).parent / "shellcheck"), str(script)], check=True)


@pytest.mark.parametrize("size", ["7b", "32b", "32b_long"])
def test_every_size_of_the_code_agent_resolves(size: str) -> None:
    script = ROOT / "train/code_agent/rl/train_dapo_code_agent.sh"
    result = dry_run(script, SIZE=size, MODEL="m")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "response", "steps", "nodes"),
    [("7b", 32768, 150, 2), ("32b", 16384, 40, 8), ("32b_long", 32768, 120, 8)],
)
def test_the_code_agent_has_the_published_hyper_parameters(
    name: str, response: int, steps: int, nodes: int
) -> None:
    _, config = command(load_settings(ROOT / f"configs/rl/code_dapo_{name}.yaml"), "/tmp/ray")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n) == (256, 32, 8)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (4096, response)
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 3.0)
    assert (actor.optim.lr, actor.optim.lr_warmup_steps, actor.loss_agg_mode) == (1e-6, 10, "token-mean")
    assert not actor.use_kl_loss
    assert not config.algorithm.use_kl_in_reward
    assert config.algorithm.adv_estimator == "grpo"
    assert config.algorithm.filter_groups.enable
    assert (rollout.name, rollout.temperature, rollout.tensor_model_parallel_size) == ("sglang", 1.0, 4)
    assert rollout.gpu_memory_utilization == 0.5
    assert rollout.skip_tokenizer_init is False
    assert (config.trainer.total_training_steps, config.trainer.nnodes) == (steps, nodes)
    assert (config.trainer.save_freq, config.trainer.test_freq) == (5, 10)


def test_the_overlong_buffer_is_the_last_eighth_of_the_response() -> None:
    for path in (ROOT / "configs" / "rl").glob("code_*.yaml"):
        settings = load_settings(path)
        assert isinstance(settings.rewards, dict)
        overlong = settings.rewards["overlong"]
        assert overlong["max_tokens"] == settings.spec().limits.max_response_tokens
        assert overlong["buffer_tokens"] * 8 == overlong["max_tokens"]


def test_the_tiny_twin_keeps_the_recipe_of_the_large_one() -> None:
    large = yaml.safe_load((ROOT / "configs/rl/code_dapo_7b.yaml").read_text())["verl"]
    tiny = yaml.safe_load((ROOT / "configs/tiny/rl/math.yaml").read_text())["verl"]
    for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "use_kl_loss"):
        assert tiny["actor_rollout_ref"]["actor"][key] == large["actor_rollout_ref"]["actor"][key]
    assert tiny["algorithm"]["filter_groups"]["enable"] is True
    assert tiny["algorithm"]["adv_estimator"] == large["algorithm"]["adv_estimator"]


@pytest.mark.slow
def test_verls_own_validation_accepts_every_configuration() -> None:
    code = """
import sys
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl_ext.plan import command
from verl_ext.settings import load_settings
for path in sys.argv[1:]:
    _, config = command(load_settings(path), "/tmp/ray")
    validate_config(config, need_reference_policy(config), need_critic(config))
"""
    subprocess.run([sys.executable, "-c", code, *map(str, CONFIGS)], check=True)
