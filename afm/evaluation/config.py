"""The settings of ``afm eval``: one YAML, refused at the first unknown key."""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from afm.agents import AgentSpec, Limits, agent_of_model, load_agent
from afm.agents.toolless import without_tools
from afm.configuration import apply_overrides, read_extended, read_file, read_in_place, validated
from afm.datasets.readers import checked_reader
from afm.errors import ConfigError, UsageError, suggestion
from afm.evaluation.agreement.settings import AgreementSettings
from afm.evaluation.argument_forms import UnseenTool
from afm.evaluation.benchmarks import checked_benchmark
from afm.evaluation.choosing.settings import BestOfSettings
from afm.evaluation.prices import Prices

CONFIG_FILE = "config.yaml"

SectionT = TypeVar("SectionT", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(_Strict):
    """Which model answers.

    Attributes:
        path: Folder of a model, or address of an OpenAI-compatible server; of several that serve it, a list, or with
            commas between.
        name: What the server calls it; what records call it.
        tokenizer: Folder of the tokenizer, for a server.
        context_tokens: Bound on prompt and response together, for a server that does not tell.
        threads: CPU threads of an in-process model.
        max_batch: Sequences an in-process model generates at once.
    """

    path: str = Field(min_length=1)
    name: str | None = None
    tokenizer: str | None = None
    context_tokens: int | None = Field(default=None, ge=1)
    threads: int | None = Field(default=None, ge=1)
    max_batch: int = Field(default=64, ge=1)

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        several = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return ",".join(value) if several else value

    @property
    def folder(self) -> Path | None:
        """The model's folder, ``None`` for a server."""
        return None if "://" in self.path else Path(self.path).expanduser()


class SamplingSettings(_Strict):
    """How the model samples; ``max_new_tokens`` bounds one generation, ``null`` leaves that to the limits."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_new_tokens: int | None = Field(default=None, ge=1)


class EvalConfig(_Strict):
    """Everything ``afm eval`` needs.

    Attributes:
        name: What the benchmark is called in reports.
        benchmark: Which published benchmark this is (see :mod:`afm.evaluation.benchmarks`); the manifest then says where
            settings are not the published ones, and absent data where it comes from.
        data: Files of tasks (JSONL, JSON, parquet, CSV, TSV), or folders of them.
        reader: Name of the layout of rows that are in none of ours: the owner's (see :mod:`afm.datasets.readers`).
        data_source: Used where a row names none; chooses the reward.
        agent: Name of a shipped agent, or path of a YAML; one that a model folder brings along wins if it has
            the same name.
        without_tools: Ask the same questions of the agent without its tools, to see whether it calls some; ``tools`` is
            then ignored.
        unseen_tools: Roles of tools that the model was not trained with, and the form of their arguments; broken ones are
            counted.
        tools: Path of a tools YAML, or its content.
        rewards: Path of a reward YAML, or its content; ``null`` is the built-in table by data source.
        limits: Overrides of the agent's limits.
        rounds: Episodes of every task.
        limit: Only the first so many tasks of every file.
        parallel: Episodes in flight.
        prices: Of tokens and tool calls, so that figures are in US dollars too.
        best_of: How a judge chooses among the rounds of a question when all are done; ``null`` for not at all.
        agreement: Who judges again when all are done, to see whether judges agree; ``null`` for nobody.
        retries: Further attempts at an episode whose engine, tools or reward failed.
        max_failed_share: Share of episodes that may end without a score before the run ends with an error.
        keep_tokens: Whether episodes hold token ids, mask and log-probabilities.
        out_dir: Where everything goes; killed runs continue there.
    """

    name: str
    benchmark: str | None = None
    data: tuple[Path, ...] = Field(min_length=1)
    reader: str | None = None
    data_source: str | None = None
    agent: str
    without_tools: bool = False
    unseen_tools: dict[str, UnseenTool] = Field(default_factory=dict)
    model: ModelSettings
    tools: Path | dict[str, Any] | None = None
    rewards: Path | dict[str, Any] | None = None
    sampling: SamplingSettings = SamplingSettings()
    limits: dict[str, Any] = Field(default_factory=dict)
    rounds: int = Field(default=1, ge=1)
    limit: int | None = Field(default=None, ge=1)
    parallel: int = Field(default=64, ge=1)
    seed: int = 0
    prices: Prices | None = None
    best_of: BestOfSettings | None = None
    agreement: AgreementSettings | None = None
    retries: int = Field(default=2, ge=0)
    max_failed_share: float = Field(default=0.1, ge=0, le=1)
    keep_tokens: bool = False
    out_dir: Path

    @field_validator("data", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("reader")
    @classmethod
    def _known_reader(cls, value: str | None) -> str | None:
        return None if value is None else checked_reader(value)

    @field_validator("benchmark")
    @classmethod
    def _known_benchmark(cls, value: str | None) -> str | None:
        return None if value is None else checked_benchmark(value)

    @field_validator("model", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("limits")
    @classmethod
    def _known_limits(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key not in Limits.model_fields:
                raise ValueError(f"a limit; {key!r} is none; {suggestion(key, Limits.model_fields)}")
        Limits.model_validate(value)
        return value

    def spec(self) -> AgentSpec:
        """The agent that is evaluated.

        Raises:
            ConfigError: No such agent, or a bad declaration.
        """
        declared = self.declared_spec()
        return without_tools(declared) if self.without_tools else declared

    def declared_spec(self) -> AgentSpec:
        """The agent with its tools.

        Raises:
            ConfigError: No such agent, or a bad declaration.
        """
        folder = self.model.folder
        return load_agent(self.agent) if folder is None else agent_of_model(folder, self.agent)

    def unseen_roles(self, spec: AgentSpec) -> dict[str, UnseenTool]:
        """``unseen_tools``, once every one is a tool role of the agent.

        Raises:
            ConfigError: One is not.
        """
        for role in self.unseen_tools:
            if role not in spec.tool_roles:
                raise ConfigError(
                    f"unseen_tools.{role}: agent {spec.name!r} has no such tool; {suggestion(role, spec.tool_roles)}"
                )
        return self.unseen_tools

    def choosing(self) -> tuple[BestOfSettings | None, str]:
        """How a judge is to choose, or ``None`` and why it cannot: too few rounds, or no judge."""
        if self.best_of is None:
            return None, ""
        sizes = tuple(k for k in self.best_of.sizes if k <= self.rounds)
        if not sizes:
            return (
                None,
                f"best-of-{min(self.best_of.sizes)} needs {min(self.best_of.sizes)} rounds, has {self.rounds}",
            )
        if self.best_of.judge.place().url is None:
            names = ", ".join(f"best-of-{k}" for k in sizes)
            return (
                None,
                f"{names} needs a judge: set GRM_BASE_URL or best_of.judge.url, then `afm eval choose {self.out_dir}`",
            )
        return self.best_of.model_copy(update={"sizes": sizes}), ""

    def agreeing(self) -> tuple[AgreementSettings | None, str]:
        """Who judges again, or ``None`` and why nobody can."""
        if self.agreement is None:
            return None, ""
        if any(judge.place().url is None for judge in self.agreement.judges):
            command = f"`afm eval agree {self.out_dir}`"
            return (
                None,
                f"agreement needs a judge: set GRM_BASE_URL or agreement.judges[..].url, then {command}",
            )
        return self.agreement, ""

    @property
    def tools_in_use(self) -> Path | dict[str, Any] | None:
        """``tools``, or ``None`` where the agent has to do without."""
        return None if self.without_tools else self.tools

    def episode_limits(self, spec: AgentSpec) -> Limits:
        """The agent's limits with these overrides."""
        return Limits.model_validate({**spec.limits.model_dump(), **self.limits})


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> EvalConfig:
    """Read a YAML of ``afm eval`` and apply ``key=value`` overrides (dots reach into mappings, values are YAML).

    A YAML may say ``extends: FILE``: mappings are merged, other values replaced. The files that ``extends``,
    ``agent``, ``tools`` and ``rewards`` name in a YAML are relative to it; data, models, ``out_dir`` and every
    override are relative to the working folder.

    Raises:
        ConfigError: A file cannot be read, or a key or value is wrong.
        UsageError: An override is wrong, or no model is given.
    """
    data = read_extended(Path(path), "evaluation settings", anchor=_anchored)
    if isinstance(data.get("model"), str):
        data["model"] = {"path": data["model"]}
    overrides = [_model_path(override) for override in overrides]
    for key in ("tools", "rewards"):
        read_in_place(data, key, overrides)
    apply_overrides(data, overrides)
    unknown = [key for key in data if key not in EvalConfig.model_fields]
    for key in unknown:
        if get_close_matches(key, ["extends", *EvalConfig.model_fields], n=1) == ["extends"]:
            raise ConfigError(f"{path}: {key}: unknown key; did you mean 'extends'?")
    if not data.get("model") and not unknown:  # a misspelt one may be it
        raise UsageError(
            f"{path}: model: missing; give the model's folder or address on the command line: model=DIR_OR_URL"
        )
    return validated(EvalConfig, data, str(path), overrides=overrides)


def saved_section(folder: Path, key: str, model: type[SectionT], overrides: Sequence[str]) -> SectionT:
    """One part of the settings that an evaluation left in ``folder``, with overrides of its own keys.

    Defaults where the evaluation had no such part, or left no settings.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong.
        UsageError: An override is wrong.
    """
    file = folder / CONFIG_FILE
    data = read_file(file, "evaluation settings").get(key) if file.exists() else None
    section: dict[str, Any] = dict(data) if isinstance(data, dict) else {}
    apply_overrides(section, overrides)
    return validated(model, section, f"{key} of {file}", overrides=overrides)


def dump_config(config: EvalConfig) -> str:
    """The resolved settings as YAML that :func:`load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _anchored(data: dict[str, Any], folder: Path) -> None:
    for key in ("agent", "tools", "rewards"):
        value = data.get(key)
        if isinstance(value, str) and value.endswith((".yaml", ".yml")):
            data[key] = os.path.normpath(folder / value)


def _model_path(override: str) -> str:
    """``model=DIR`` is short for ``model.path=DIR``."""
    key, _, value = override.partition("=")
    short = key.strip() == "model" and not value.lstrip().startswith("{")
    return f"model.path={value}" if short else override
