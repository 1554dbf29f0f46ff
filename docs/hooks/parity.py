"""The page docs/parity.md, made of the published facts and our recipes: ``python docs/hooks/parity.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from afm.configuration import read_extended, read_file
from afm.presets import Kind, PresetSource, PublishedRecipe, PublishedSetting, published
from afm.rewards import RewardSettings
from llamafactory_patch.config import resolve
from verl_ext.compose import compose, overrides_of
from verl_ext.doctor_episodes import reward_settings
from verl_ext.settings import RlSettings, load_settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "parity.md"
TITLES: dict[Kind, str] = {
    "sft": "Supervised fine-tuning: `configs/sft`",
    "rl": "Reinforcement learning: `configs/rl`",
    "eval": "Evaluation: `configs/eval`",
    "tools": "Tools: `configs/tools`",
}
_UNSAID = "-"
_MISSING = object()
_DEFAULTS = {"warmup_steps": 0}


def our_value(kind: Kind, name: str, key: str) -> Any:
    """What the recipe of ours has at ``key``, defaults of the engine included."""
    if kind == "sft":
        return _sft(name).get(key, _DEFAULTS.get(key))
    if kind == "eval":
        return _inside(read_extended(ROOT / f"configs/eval/{name}.yaml"), key)
    if kind == "tools":
        entries = read_file(ROOT / "configs/tools/all.yaml")["tools"]
        return next(
            _inside(entry["config"], key)
            for entry in entries
            if entry["tool_schema"]["function"]["name"] == name
        )
    settings, rewards, composed = _rl(name)
    head, _, rest = key.partition(".")
    if head == "verl":
        return OmegaConf.select(composed, rest)
    value = _inside(rewards if head == "rewards" else settings.spec().limits, rest)
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


@cache
def _sft(name: str) -> dict[str, Any]:
    return resolve(ROOT / f"configs/sft/{name}.yaml").config


@cache
def _rl(name: str) -> tuple[RlSettings, RewardSettings, Any]:
    settings = load_settings(ROOT / f"configs/rl/{name}.yaml")
    return settings, reward_settings(settings.routes().first.rewards), compose(overrides_of(settings))


def _inside(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else getattr(tree, part)
    return tree


def page() -> str:
    """The whole page, in Markdown."""
    facts = published()
    lines = [
        "# Our recipes and the published ones",
        "",
        "`python docs/hooks/parity.py` makes this page from `afm/published.yaml` and `configs/`.",
        "",
        f"- **script** is the published repository at `{facts.revision}`, and **line** the line of the script that holds the",
        "  value. A line of another file is a default or a place in the code.",
        f"- **paper** is {facts.paper}.",
        f"- `{_UNSAID}` marks a value that the source does not give.",
        "- A value in **bold** differs from a source.",
        "",
        "`afm rl RECIPE preset=script` applies all values of a source to the recipe (`script`, `paper`, or `ours`, the default).",
        "`afm sft` has the same setting. Overrides after it take precedence. Values that the source does not give stay ours.",
        "`preset=script:NAME` takes the values of the recipe `NAME` for a recipe of your own. `--dry-run` prints the settings,",
        "and the run's own file keeps them. With `script` or `paper` a recipe of `configs/rl` also takes the published limits of",
        "its tools.",
        "",
        *(f"- {text}" for text in facts.variants),
    ]
    for kind, title in TITLES.items():
        lines += ["", f"## {title}"]
        for name, recipe in facts.recipes(kind).items():
            lines += ["", *_table(kind, name, recipe)]
    return "\n".join(lines) + "\n"


def _table(kind: Kind, name: str, recipe: PublishedRecipe) -> Iterator[str]:
    given = getattr(published(), kind)[name]
    yield f"### `{name}`"
    yield ""
    if given.like:
        apart = ", ".join(f"`{key.rsplit('.', 1)[-1]}`" for key in given.apart)
        yield (
            f"As `{given.like}`."
            + (f"\nNo source gives {apart}." if apart else "")
            + ("\nThe paper's own values:" if given.facts else "")
        )
    else:
        yield f"Script: `{recipe.file}`." + (f" Paper: {recipe.section}." if recipe.section else "")
    shown = given.facts if given.like else recipe.facts
    if not shown:
        return
    yield from ("", "| setting | ours | script | line | paper |", "|---|---|---|---|---|")
    reasons = []
    for key in shown:
        fact = recipe.facts[key]
        ours = our_value(kind, name, key)
        yield _row(key, ours, fact)
        if fact.ours:
            reasons.append(f"- `{key}` is ours: {fact.ours}.")
    if reasons:
        yield from ("", *reasons)


def _row(key: str, ours: Any, fact: PublishedSetting) -> str:
    said = fact.said()
    mark = "**" if any(value != ours for value in said.values()) else ""
    script, paper = (
        _cell(said.get(source, _MISSING)) for source in (PresetSource.SCRIPT, PresetSource.PAPER)
    )
    lines = ", ".join(_place(place.partition(" ")[0]) for place in fact.at)
    return f"| `{key}` | {mark}{_cell(ours)}{mark} | {script} | {lines or _UNSAID} | {paper} |"


def _place(place: str) -> str:
    name, colon, line = place.partition(":")
    return f"{Path(published().files[name]).name}:{line}" if colon else place


def _cell(value: Any) -> str:
    if value is _MISSING:
        return _UNSAID
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    words = value if isinstance(value, str) else json.dumps(value).replace('"', "")
    return f"`{words}`" if isinstance(value, str | dict) else words


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
