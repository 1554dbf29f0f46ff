"""The filters of a run in their order: read from YAML, and built for an agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import model_validator

from afm.agents import AgentSpec
from afm.configuration import Settings, read_extended, validated
from afm.distill.filters.base import Filter
from afm.distill.filters.contamination import ContaminationFilter, ContaminationSettings
from afm.distill.filters.near_duplicates import NearDuplicateSettings, Signer
from afm.distill.filters.quality import LanguageFilter, LanguageSettings, QualityFilter, QualitySettings
from afm.distill.filters.rules import (
    ComplexityFilter,
    ComplexitySettings,
    Correction,
    CorrectionSettings,
    FormatFilter,
    FormatSettings,
    LengthFilter,
    LengthSettings,
    ReflectionFilter,
    ReflectionSettings,
    RepetitionFilter,
    RepetitionSettings,
)
from afm.distill.filters.sensitive import PersonalSettings, SecretSettings, SensitiveFilter
from afm.rewards import load_reward
from afm.tools.registry import readers_of

_PATHS = {"format": "tools", "quality": "reward", "length": "tokenizer", "contamination": "tasks"}
"""The setting of each stage that names files, relative to the YAML's folder."""


class StageSettings(Settings):
    """One stage: exactly one filter with its settings. ``{}`` means the defaults."""

    complexity: ComplexitySettings | None = None
    format: FormatSettings | None = None
    repetition: RepetitionSettings | None = None
    quality: QualitySettings | None = None
    reflection: ReflectionSettings | None = None
    length: LengthSettings | None = None
    language: LanguageSettings | None = None
    secrets: SecretSettings | None = None
    personal: PersonalSettings | None = None
    contamination: ContaminationSettings | None = None
    near_duplicates: NearDuplicateSettings | None = None
    correction: CorrectionSettings | None = None

    @model_validator(mode="after")
    def _one(self) -> StageSettings:
        if len(self._given()) != 1:
            raise ValueError("exactly one filter with its settings, for example `format: {}`")
        return self

    @property
    def name(self) -> str:
        """The name of the filter."""
        return self._given()[0]

    @property
    def settings(self) -> Settings:
        """The settings of the filter."""
        settings: Settings = getattr(self, self.name)
        return settings

    def _given(self) -> list[str]:
        return [name for name in type(self).model_fields if getattr(self, name) is not None]


class FilterPlan(Settings):
    """A file of filters, with the default agent and the seed of every draw."""

    agent: str | None = None
    seed: int = 0
    stages: tuple[StageSettings, ...]

    @model_validator(mode="after")
    def _check(self) -> FilterPlan:
        if not self.stages:  # not by `min_length`, whose message also covers wrong items
            raise ValueError("stages: got none, expected at least 1 item, for example `format: {}`")
        names = [stage.name for stage in self.stages]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"stages: {twice} listed twice; expected each filter once")
        if "correction" in names[:-1]:
            raise ValueError("stages: `correction` repeats kept rows, so it must be the last")
        if "near_duplicates" in names[:-1] and names[names.index("near_duplicates") + 1 :] != ["correction"]:
            raise ValueError(
                "stages: a row that a later stage drops would have removed its twins before; expected `near_duplicates` "
                "after all others except `correction`"
            )
        return self

    def against(self, tasks: Sequence[Path]) -> FilterPlan:
        """Return the plan with more evaluation sets for ``contamination``. A missing stage is added at the front."""
        if not tasks:
            return self
        stages, present = [], False
        for stage in self.stages:
            if stage.contamination is not None:
                more = {"tasks": (*stage.contamination.tasks, *tasks)}
                stage = StageSettings(contamination=stage.contamination.model_copy(update=more))
                present = True
            stages.append(stage)
        if not present:
            stages.insert(0, StageSettings(contamination=ContaminationSettings(tasks=tuple(tasks))))
        return self.model_copy(update={"stages": tuple(stages)})


Stage = Filter | Signer
"""A filter of single rows, or the part of ``near_duplicates`` that works on single rows."""


def load_plan(path: str | Path) -> FilterPlan:
    """Read a YAML of filters. Paths in it are relative to its folder.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong.
    """
    file = Path(path)
    return validated(FilterPlan, read_extended(file, "filter settings", anchor=_anchor), str(file))


def build_stages(plan: FilterPlan, spec: AgentSpec) -> tuple[Stage, ...]:
    """Build the stages of a plan for one agent, in order.

    Raises:
        ConfigError: A stage does not suit the agent.
        DataError: An evaluation set cannot be read.
        MissingExtraError: A stage needs a package that is not installed.
    """
    return tuple(_build(stage.settings, stage.name, spec, plan.seed) for stage in plan.stages)


_FILTERS: Mapping[str, Callable[[AgentSpec, Any], Stage]] = {
    "complexity": ComplexityFilter,
    "repetition": RepetitionFilter,
    "length": LengthFilter,
    "language": LanguageFilter,
    "secrets": SensitiveFilter,
    "personal": SensitiveFilter,
    "contamination": ContaminationFilter,
    "near_duplicates": Signer,
    "correction": Correction,
}
"""Filters that need only the agent and their settings."""


def _build(settings: Settings, name: str, spec: AgentSpec, seed: int) -> Stage:
    match settings:
        case FormatSettings():
            return FormatFilter(spec, readers_of(settings.tools))
        case QualitySettings():
            return QualityFilter(spec, load_reward(settings.reward), settings.min_score, settings.recorded)
        case ReflectionSettings():
            return ReflectionFilter(spec, settings, seed)
    return _FILTERS[name](spec, settings)


def _anchor(data: dict[str, Any], folder: Path) -> None:
    stages = data.get("stages")
    for stage in stages if isinstance(stages, list) else ():
        for name, key in _PATHS.items():
            settings = stage.get(name) if isinstance(stage, Mapping) else None
            if isinstance(settings, dict) and settings.get(key):
                settings[key] = _anchored(settings[key], folder)


def _anchored(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_anchored(item, folder) for item in value]
    return str(folder / value) if isinstance(value, str) else value
