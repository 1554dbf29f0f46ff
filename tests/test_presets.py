import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from published_repository import needs_repository, published_text

from afm.errors import ConfigError
from afm.presets import (
    PresetSource,
    PublishedRecipe,
    PublishedSetting,
    preset_lines,
    published,
    take_preset,
)

ROOT = Path(__file__).resolve().parents[1]


def taken(recipe: str, *overrides: str, **data: Any) -> tuple[dict[str, Any], list[str], list[str]]:
    """The data with the preset laid over it, the overrides that are left, and the keys that the preset set."""
    rest, preset = take_preset(data, "rl", Path(f"{recipe}.yaml"), overrides)
    return data, rest, list(preset.values) if preset else []


def test_a_source_overrides_the_recipe_and_leaves_what_it_does_not_say() -> None:
    data, _, keys = taken(
        "web_dapo_32b",
        "preset=paper",
        rewards={"formula": "correct + overlong", "overlong": {"max_tokens": 9}, "judge": {"attempts": 2}},
        verl={"trainer": {"total_training_steps": 60, "save_freq": 7}},
    )
    assert data["rewards"] == {"formula": "correct", "overlong": None, "judge": {"attempts": 2}}
    assert data["verl"]["trainer"] == {"total_training_steps": 24, "save_freq": 7}
    assert "verl.trainer.save_freq" not in keys


def test_what_the_user_sets_is_left_to_the_user() -> None:
    overrides = ["preset=script", "limits.max_turns=3", "rewards.overlong.max_tokens=5", "seed=1"]
    _, rest, keys = taken("web_dapo_32b", *overrides)
    assert rest == overrides[1:]
    assert not {"limits.max_turns", "rewards.overlong"} & set(keys)
    assert "limits.max_response_tokens" in keys


def test_the_published_limits_of_tools_are_part_of_the_preset() -> None:
    tools = str(ROOT / "configs/tools/code_executor.yaml")
    data, _, keys = taken("code_dapo_32b", "preset=script", tools=tools)
    config = data["tools"]["tools"][0]["config"]
    assert config["limits"] == {"cpu_s": 5, "wall_s": 7.0, "memory_bytes": 5000 * 2**20}
    assert config["sandbox"] == {"backend": "auto"}
    assert {key for key in keys if key.startswith("tools.")} == {
        "tools.code.max_observation_chars",
        *(f"tools.code.limits.{name}" for name in config["limits"]),
    }


def test_agents_of_a_recipe_that_have_rewards_and_limits_of_their_own_get_the_published_ones() -> None:
    agents = {"math": {"rewards": {"formula": "correct * format"}, "limits": {"max_turns": 2}}, "code": {}}
    data, *_ = taken("code_dapo_32b", "preset=script", agents=agents)
    assert data["agents"]["math"]["rewards"] == {"formula": "correct", "overlong": None}
    assert data["agents"]["math"]["limits"]["max_turns"] == 8
    assert data["agents"]["code"] == {}


def test_ours_is_the_default_and_changes_nothing() -> None:
    assert taken("web_dapo_32b", "preset=ours", "seed=1", limits={}) == ({"limits": {}}, ["seed=1"], [])
    assert taken("of_my_own", limits={}) == ({"limits": {}}, [], [])
    assert preset_lines({}) == []


def test_a_recipe_of_ones_own_names_the_published_one() -> None:
    data, *_ = taken("of_my_own", preset="paper:code_dapo_7b")
    assert data["verl"]["trainer"]["total_training_steps"] == 150
    assert data["limits"]["max_response_tokens"] == 32768


@pytest.mark.parametrize(
    ("recipe", "preset", "message"),
    [
        ("web_dapo_32b", "scripts", "got 'scripts', expected script, paper or ours"),
        ("web_dapo", "script", "nothing is published for a recipe 'web_dapo'; did you mean 'web_dapo_"),
        ("mhqa_ppo_7b", "paper", "the paper has no settings of mhqa_ppo_7b"),
    ],
)
def test_a_preset_that_does_not_exist_is_refused(recipe: str, preset: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        taken(recipe, f"preset={preset}")


def published_lines(path: str) -> list[str]:
    return published_text(path).splitlines()


def faults(recipe: PublishedRecipe, key: str, fact: PublishedSetting) -> Iterator[str]:
    """What the published files do not say as the fact has it."""
    script = "\n".join(published_lines(recipe.file))
    for place in fact.at:
        where, _, word = place.partition(" ")
        file, colon, line = where.rpartition(":")
        if where == "transformers":
            if f"--{'warmup_ratio' if key == 'warmup_steps' else key} " in script:
                yield f"{recipe.file} sets {key}"
            continue
        text = published_lines(published().files[file] if colon else recipe.file)[int(line) - 1]
        value = fact.said()[PresetSource.SCRIPT]
        plain = str(value).lower() if isinstance(value, bool) else str(value).replace("e-0", "e-")
        if not re.search(rf"(?<![\w.]){re.escape(word or plain)}(?![\w.])", text):
            yield f"{place}: {text.strip()!r}, expected {word or plain}"
        if file == "verl" and key.startswith("verl.") and f"{key.removeprefix('verl.')}=" in script:
            yield f"{recipe.file} sets {key}, so the default of {where} does not hold"


@needs_repository
def test_the_published_lines_say_what_the_facts_say() -> None:
    for kind in ("rl", "sft", "eval", "tools"):
        for name, recipe in getattr(published(), kind).items():
            whole = published().recipes(kind)[name]
            found = [fault for key in recipe.facts for fault in faults(whole, key, whole.facts[key])]
            assert not found, (kind, name, found)


def test_every_fact_of_the_scripts_has_its_line_and_every_one_of_the_paper_its_topic() -> None:
    for kind in ("rl", "sft", "eval", "tools"):
        for name, recipe in published().recipes(kind).items():
            for key, fact in recipe.facts.items():
                assert fact.said(), (name, key)
                assert PresetSource.SCRIPT not in fact.said() or fact.at, (name, key)
                assert PresetSource.PAPER not in fact.said() or recipe.section, (name, key)
