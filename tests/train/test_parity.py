"""Every published fact against the recipe of ours that claims it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from extras import needs

from afm.evaluation.benchmarks import CODE, QUESTIONS, WEB, PublishedSettings
from afm.presets import published
from llamafactory_patch.config import resolve
from llamafactory_patch.run_folder import config_text
from verl_ext.command import command
from verl_ext.doctor_episodes import reward_settings
from verl_ext.settings import as_plain, load_settings

needs("verl", "llamafactory")


ROOT = Path(__file__).resolve().parents[2]
RECIPES = [
    pytest.param(kind, name, id=f"{kind}-{name}")
    for kind in ("sft", "rl", "eval", "tools")
    for name in getattr(published(), kind)
]


@pytest.fixture(scope="module")
def parity() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs/hooks")
        return importlib.import_module("parity")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), RECIPES)
def test_a_recipe_has_the_values_of_a_source_or_a_reason(parity: Any, kind: Any, name: str) -> None:
    for key, fact in published().recipes(kind)[name].facts.items():
        ours, said = parity.our_value(kind, name, key), fact.said().values()
        if ours in said:
            assert all(value == ours for value in said) or not fact.ours, f"{key}: a reason for nothing"
        else:
            assert fact.ours, f"{key}: ours is {ours!r}, published {list(said)}, and no reason is given"


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_every_recipe_of_full_size_stands_in_the_table(kind: Any) -> None:
    files = {path.stem for path in (ROOT / "configs" / kind).glob("*_*.yaml")}
    named = published().recipes(kind)
    assert named.keys() <= files
    agents = ("web_", "code_", "mhqa_")
    assert {name for name in files if name.startswith(agents) and not name.endswith("_lora")} == named.keys()


@pytest.mark.slow
def test_the_page_is_the_one_that_facts_and_recipes_give(parity: Any) -> None:
    assert parity.PAGE.read_text("utf-8") == parity.page(), "run: python docs/hooks/parity.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", published().rl)
def test_verl_accepts_every_recipe_with_the_published_settings(name: str) -> None:
    settings = load_settings(ROOT / f"configs/rl/{name}.yaml", ["preset=script", "verl.trainer.save_freq=7"])
    _, config = command(settings, "/tmp/ray")
    facts = published().recipes("rl")[name].facts
    assert config.trainer.total_training_steps == facts["verl.trainer.total_training_steps"].script
    assert config.data.max_response_length == facts["limits.max_response_tokens"].script
    assert config.trainer.save_freq == 7
    rewards = reward_settings(settings.routes().first.rewards)
    assert (rewards.formula, rewards.overlong) == ("correct", None)


def test_the_preset_is_part_of_a_runs_own_settings(tmp_path: Path) -> None:
    settings = load_settings(ROOT / "configs/rl/code_dapo_32b.yaml", ["preset=paper", "limits.max_turns=4"])
    assert settings.published is not None
    assert (settings.published["source"], settings.published["recipe"]) == ("paper", "code_dapo_32b")
    assert "limits.max_turns" not in settings.published["values"]
    written = tmp_path / "rl_config.yaml"
    written.write_text(yaml.safe_dump(as_plain(settings)), encoding="utf-8")
    assert as_plain(load_settings(written)) == as_plain(settings)


def test_a_fine_tuning_with_a_preset_is_another_training_and_says_so() -> None:
    recipe = ROOT / "configs/sft/web_agent_qwen2.5_7b.yaml"
    ours, paper = resolve(recipe), resolve(recipe, ["preset=paper", "num_train_epochs=1"])
    assert (ours.config["gradient_accumulation_steps"], ours.dependencies().get("published")) == (16, None)
    assert (paper.config["gradient_accumulation_steps"], paper.config["num_train_epochs"]) == (32, 1)
    values = {"learning_rate": 1.4e-5, "gradient_accumulation_steps": 32}
    assert paper.dependencies()["published"]["values"] == values
    noted = "# preset paper of web_agent_qwen2.5_7b: 2 settings\n#   learning_rate = 1.4e-05\n"
    assert noted in config_text(paper, paper.config)


@pytest.mark.parametrize(("name", "table"), [("web", WEB), ("qa", QUESTIONS), ("code", CODE)])
def test_the_settings_that_reports_compare_with_are_these_facts(name: str, table: PublishedSettings) -> None:
    facts = published().recipes("eval")[name].facts
    assert set(table.temperatures) & set(facts["sampling.temperature"].said().values())
    assert table.top_p in facts["sampling.top_p"].said().values()
    assert table.response_tokens in facts["limits.max_response_tokens"].said().values()
    assert table.turns in facts["limits.max_turns"].said().values()
