"""Settings of the published system, applied to one of our recipes: ``preset=script|paper|ours``.

The facts are in ``published.yaml``, each with its source: a line of the published repository or a topic of the paper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from afm.configuration import Settings, apply_overrides, override_key, read_file, read_in_place, validated
from afm.errors import ConfigError, suggestion
from afm.terminal import plural

FACTS_FILE = Path(__file__).with_name("published.yaml")
Kind = Literal["rl", "sft", "eval", "tools"]


class PresetSource(StrEnum):
    """The source of a recipe's settings."""

    OURS = "ours"
    """The recipe unchanged."""
    SCRIPT = "script"
    """The published training scripts and the defaults behind them."""
    PAPER = "paper"


class PublishedSetting(Settings):
    """The values of one key of a recipe, by source. A source may have no value."""

    script: Any = None
    """The value in the published repository."""
    paper: Any = None
    """The value in the paper."""
    at: tuple[str, ...] = ()
    """The source in the repository: ``LINE`` or ``FILE:LINE``, and its text where that is not the value."""
    ours: str = ""
    """Why our recipe differs from both."""

    @field_validator("at", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> tuple[str, ...]:
        return tuple(map(str, value)) if isinstance(value, list) else (str(value),)

    def said(self) -> dict[PresetSource, Any]:
        """Return the values of the sources that have one."""
        return {
            source: getattr(self, source)
            for source in (PresetSource.SCRIPT, PresetSource.PAPER)
            if source in self.model_fields_set
        }


class PublishedRecipe(Settings):
    """The facts of one recipe."""

    file: str = ""
    """The published file with the lines in ``at``."""
    section: str = ""
    """Topic of the paper."""
    like: str = ""
    """Another recipe whose facts also apply here, except for the keys in ``apart``."""
    apart: tuple[str, ...] = ()
    facts: dict[str, PublishedSetting] = Field(default_factory=dict)


class Published(Settings):
    """All facts. Their keys are those of our recipes."""

    revision: str
    paper: str
    files: dict[str, str]
    rl: dict[str, PublishedRecipe]
    sft: dict[str, PublishedRecipe]
    eval: dict[str, PublishedRecipe]
    tools: dict[str, PublishedRecipe]
    variants: tuple[str, ...]

    def recipes(self, kind: Kind) -> dict[str, PublishedRecipe]:
        """Return the recipes of a kind, each with the facts from the recipe that it is ``like``."""
        recipes: dict[str, PublishedRecipe] = getattr(self, kind)
        return {name: _whole(recipes, recipe) for name, recipe in recipes.items()}


def _whole(recipes: Mapping[str, PublishedRecipe], recipe: PublishedRecipe) -> PublishedRecipe:
    if not recipe.like:
        return recipe
    base = recipes[recipe.like]
    facts = {key: fact for key, fact in base.facts.items() if key not in recipe.apart}
    for key, own in recipe.facts.items():
        changed = {name: getattr(own, name) for name in own.model_fields_set}
        facts[key] = facts[key].model_copy(update=changed) if key in facts else own
    return recipe.model_copy(
        update={"facts": facts, "file": base.file, "section": recipe.section or base.section}
    )


@cache
def published() -> Published:
    """The facts of ``published.yaml``."""
    return validated(Published, read_file(FACTS_FILE, "published facts"), FACTS_FILE.name)


@dataclass(frozen=True, slots=True)
class AppliedPreset:
    """Settings that a recipe got from a source, by key, without those that the user set."""

    source: PresetSource
    recipe: str
    values: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return an entry for the settings of a run."""
        revision = {"revision": published().revision} if self.source is PresetSource.SCRIPT else {}
        return {"source": self.source.value, **revision, "recipe": self.recipe, "values": self.values}


def preset_lines(taken: Mapping[str, Any]) -> list[str]:
    """Return the lines to print for :meth:`AppliedPreset.as_dict`: one per setting, none without a preset."""
    if not taken:
        return []
    values = taken["values"]
    head = f"preset {taken['source']} of {taken['recipe']}: {plural(len(values), 'setting')}"
    return [head, *(f"  {key} = {json.dumps(value)}" for key, value in values.items())]


def take_preset(
    data: dict[str, Any], kind: Literal["rl", "sft"], path: Path, overrides: Sequence[str]
) -> tuple[list[str], AppliedPreset | None]:
    """Merge the settings of ``preset`` into ``data``, in place.

    The file or an override sets ``preset``: ``script``, ``paper``, ``ours``, or ``script:NAME`` for a recipe with another
    name. Keys without a value in the source keep the recipe's value.

    Returns:
        The other overrides, which are not applied yet, and the values of the preset.

    Raises:
        ConfigError: The preset does not exist, or nothing is published for the recipe.
    """
    asked = data.pop("preset", None)
    rest = []
    for override in overrides:
        if override_key(override) == "preset":
            asked = override.partition("=")[2].strip()
        else:
            rest.append(override)
    source, _, named = str(asked or PresetSource.OURS).partition(":")
    if source not in set(PresetSource):
        raise ConfigError(
            f"preset: got {asked!r}, expected script, paper or ours; {suggestion(source, list(PresetSource))}"
        )
    if source == PresetSource.OURS:
        return rest, None
    name = named or path.stem
    values = _values(kind, name, PresetSource(source))
    _lay(data, values)
    kept = {key: value for key, value in values.items() if not _typed(key, rest)}
    return rest, AppliedPreset(PresetSource(source), name, kept)


def _values(kind: Literal["rl", "sft"], name: str, source: PresetSource) -> dict[str, Any]:
    recipes = published().recipes(kind)
    if name not in recipes:
        raise ConfigError(
            f"preset={source}: nothing is published for a recipe {name!r}; {suggestion(name, recipes)}, "
            f"or take the values of one of these with preset={source}:NAME"
        )
    facts = dict(recipes[name].facts)
    if kind == "rl":
        for tool, recipe in published().recipes("tools").items():
            facts |= {f"tools.{tool}.{key}": fact for key, fact in recipe.facts.items()}
    values = {key: fact.said()[source] for key, fact in facts.items() if source in fact.said()}
    if not values:
        raise ConfigError(f"preset={source}: the {source} has no settings of {name}; leave preset out")
    return values


def _lay(data: dict[str, Any], values: dict[str, Any]) -> None:
    """Write ``values`` into ``data``, and drop settings of tools that the recipe does not have."""
    settings = {key: value for key, value in values.items() if not key.startswith("tools.")}
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    for place in ("rewards", "tools"):
        read_in_place(data, place, [f"{key}=" for key in values])
    routes = [route for route in dict(data.get("agents") or {}).values() if isinstance(route, dict)]
    for route in routes:
        own = [word for word in words if word.partition(".")[0] in route]
        read_in_place(route, "rewards", own)
        apply_overrides(route, own)
    apply_overrides(data, words)
    laid = [key for place in (data, *routes) for key in _lay_on_tools(place, values)]
    for key in [key for key in values if key.startswith("tools.") and key not in laid]:
        del values[key]


def _lay_on_tools(place: dict[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Write the settings of tools into the tools of ``place``, and return the keys that were set."""
    tools = place.get("tools")
    if isinstance(tools, str):
        place["tools"] = tools = read_file(Path(tools), "tools settings")
    laid = []
    for entry in (tools or {}).get("tools", ()):
        prefix = f"tools.{entry['tool_schema']['function']['name']}."
        for key in [key for key in values if key.startswith(prefix)]:
            config = entry.setdefault("config", {})
            apply_overrides(config, [f"{key.removeprefix(prefix)}={json.dumps(values[key])}"])
            laid.append(key)
    return laid


def _typed(key: str, overrides: Sequence[str]) -> bool:
    """Return whether the user set ``key``, a key below it, or a key above it."""
    typed = [override_key(override) for override in overrides]
    return any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in typed)
