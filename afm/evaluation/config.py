"""The settings of ``afm eval`` in one YAML. An unknown key is an error."""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, field_validator, model_validator

from afm.agents import AgentSpec, LimitOverrides, PromptMode, PromptSource, agent_of_model, load_agent
from afm.agents.load import without_tools
from afm.configuration import (
    OneOrMany,
    Settings,
    apply_overrides,
    override_key,
    read_extended,
    read_file,
    read_in_place,
    validated,
)
from afm.datasets.readers import checked_reader
from afm.errors import ConfigError, UsageError, suggestion
from afm.evaluation.benchmarks import checked_benchmark
from afm.evaluation.best_of import BestOfSettings
from afm.evaluation.judging import AgreementSettings
from afm.evaluation.prices import Prices
from afm.evaluation.tallies import UnseenTool
from afm.harness.settings import OF_THE_LOOP, HarnessSettings, anchor_harness, fault_of_harness
from afm.models.base import FloatType, ToolCalls
from afm.rollout.published_protocol import PublishedProtocol, check_agent
from afm.rollout.routes import AgentRoute, AgentRoutes, Route, Routes, anchor_routes, routes_of

CONFIG_FILE = "config.yaml"

SectionT = TypeVar("SectionT", bound=BaseModel)


class ModelSettings(Settings):
    """Which model answers."""

    path: str = Field(min_length=1)
    """Folder of a model, or address of an OpenAI-compatible server, or a list of servers of one model."""
    name: str | None = None
    """The model's name at the server and in records."""
    tokenizer: str | None = None
    """Folder of the tokenizer, for a server."""
    context_tokens: int | None = Field(default=None, ge=1)
    """Limit on prompt and response together. The default is that of the model or server."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of an in-process model."""
    dtype: FloatType | None = None
    """Data type of an in-process model. The default is float32 on a CPU, bfloat16 on a GPU."""
    max_batch: int = Field(default=64, ge=1)
    """Number of sequences that an in-process model generates at once."""
    chat: ToolCalls | None = None
    """Chat completions, for a server without token ids (counts are estimates). Tool calls: ``tags`` or ``native``."""
    request: dict[str, Any] = Field(default_factory=dict)
    """Merged into the fields of a chat request; ``null`` removes one, e.g. ``{max_tokens: null,
    max_completion_tokens: 4096}``."""

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        several = isinstance(value, list) and all(isinstance(path, str) for path in value)
        return ",".join(value) if several else value

    @model_validator(mode="after")
    def _chats_with_a_server(self) -> Self:
        if self.request and self.chat is None:
            raise ValueError("no `request` without `chat`; only chat requests have fields to change")
        if self.folder is None and (self.threads or self.dtype):
            raise ValueError("no `threads` or `dtype` with a server; they are for a model in this process")
        if self.chat is not None and (
            self.folder is not None or self.tokenizer is not None or "," in self.path
        ):
            raise ValueError("the address of one server and no tokenizer with `chat`; otherwise no `chat`")
        return self

    @property
    def folder(self) -> Path | None:
        """Folder of the model, ``None`` for a server."""
        return None if "://" in self.path else Path(self.path).expanduser()


class TeamChoice(Settings):
    """The team that answers in place of a model."""

    file: str = Field(min_length=1)
    """YAML of a team, as for ``afm data distill --team``. ``scripted`` is the embedded team of the agent."""
    changes: tuple[str, ...] = ()
    """``key=value`` for that file, e.g. ``budget.usd=5``."""


class SamplingSettings(Settings):
    """How the model samples. ``max_new_tokens`` limits one generation. With ``null`` only ``limits`` apply."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_new_tokens: int | None = Field(default=None, ge=1)


class EvalConfig(Settings):
    """Settings of ``afm eval``."""

    name: str
    """Name of the benchmark in reports."""
    benchmark: Annotated[str, AfterValidator(checked_benchmark)] | None = None
    """Name of the published benchmark, from the list in docs/evaluation.md. The manifest then lists settings
    that differ from the published ones, and the error for missing data names its source."""
    data: OneOrMany[Path] = Field(min_length=1)
    """Files of tasks (JSONL, JSON, parquet, CSV, TSV), or folders of them."""
    reader: Annotated[str, AfterValidator(checked_reader)] | None = None
    """Name of the reader, for rows whose layout differs from ours. See docs/data.md."""
    data_source: str | None = None
    """Data source of rows without one. It selects the reward."""
    prompt: str = "own"
    """Prompt of each question: ``own`` (the agent's), ``row`` (the row's) or a file with ``{question}``. See
    docs/prompts.md."""
    prompt_check: bool = True
    """``false`` allows other prompts than the model was trained with."""
    agent: str = ""
    """Name of a shipped agent, or path of a YAML. An agent of the same name in the model's folder replaces
    it."""
    agents: AgentRoutes = Field(default_factory=dict)
    """Maps rows to agents, for data sets with rows of several agents."""
    without_tools: bool = False
    """Ask the agent the same questions without its tools, to see whether it still calls them. ``tools`` is then
    ignored."""
    unseen_tools: dict[str, UnseenTool] = Field(default_factory=dict)
    """Tool roles that the model was not trained with, and the form of their arguments. Calls with another form
    are counted."""
    model: ModelSettings | None = None
    """The model to evaluate. A folder or an address is short for ``{path: ...}``."""
    team: TeamChoice | None = None
    """A team in place of a model. A path is short for ``{file: ...}``. Sampling and limits are then those of
    the file."""
    harness: HarnessSettings | None = None
    """A program of your own, or a team, asks the model in place of the agent's loop, as in ``afm rl``. See docs/harness.md."""
    tools: Path | dict[str, Any] | None = None
    """Path of a tools YAML, or its content."""
    rewards: Path | dict[str, Any] | None = None
    """Path of a reward YAML, or its content. ``null`` is the built-in table by data source."""
    sampling: SamplingSettings = SamplingSettings()
    """How the model samples: ``temperature``, ``top_p``, ``top_k`` and ``max_new_tokens`` of one
    generation."""
    limits: LimitOverrides = Field(default_factory=dict)
    """Overrides of the agent's limits."""
    protocol: Literal["ours", "published"] = "ours"
    """``ours``, or ``published`` to play episodes as AFM's script plays its web agent
    (docs/evaluation.md)."""
    rounds: int = Field(default=1, ge=1)
    """Episodes per task."""
    limit: int | None = Field(default=None, ge=1)
    """Number of tasks to take from the start of each file."""
    parallel: int = Field(default=64, ge=1)
    """Episodes in progress at the same time."""
    seed: int = 0
    """Seed. With task and round it determines all randomness."""
    prices: Prices | None = None
    """Prices of tokens and tool calls, to report US dollars too."""
    best_of: BestOfSettings | None = None
    """How a judge chooses among the rounds of a question at the end. ``null`` switches it off."""
    agreement: AgreementSettings | None = None
    """Judges that judge again at the end, to measure agreement. ``null`` switches it off."""
    retries: int = Field(default=2, ge=0)
    """Further attempts at an episode whose engine, tools or reward failed."""
    max_failed_share: float = Field(default=0.1, ge=0, le=1)
    """Share of episodes that may end without a score before the run ends with an error."""
    keep_tokens: bool = False
    """Whether to keep token ids, mask and log-probabilities of episodes."""
    output_dir: Path
    """Folder for everything that the run writes. Run the same command again to resume."""

    @field_validator("model", "team", mode="before")
    @classmethod
    def _name_alone(cls, value: Any, info: ValidationInfo) -> Any:
        key = "path" if info.field_name == "model" else "file"
        return {key: value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if fault := self._fault() or (self.harness and fault_of_harness(self)):
            raise ValueError(fault)
        return self

    def _fault(self) -> str | None:
        """Return the first conflict between settings."""
        if (self.model is None) == (self.team is None):
            return "give exactly one of `model` and `team`; either a model or a team answers"
        if not self.agent and not self.agents:
            return "agent: missing, but required"
        if self.team is not None:
            if any(getattr(self, name) for name in OF_THE_LOOP) or self.protocol != "ours":
                return "without_tools, unseen_tools, keep_tokens and protocol are for a model, not for a team"
            if self.agents:
                return "agents: a team answers as one agent; remove `agents`, or give a model in its place"
        if self.model is not None and self.model.chat is not None:
            if self.keep_tokens or self.harness:
                return "no keep_tokens and no harness with model.chat: a chat endpoint shows no token ids"
            if self.sampling.top_k:
                return "no sampling.top_k with model.chat: chat completions lack it; try model.request.top_k"
            if self.agents and self.model.chat is ToolCalls.NATIVE:
                return "model.chat=tags where rows choose their agent; model.chat=native offers the tools of one agent"
        return None

    def prompt_source(self, route: Route) -> PromptSource:
        """Return the source of the prompts of an agent's rows.

        Raises:
            ConfigError: The prompt file is missing or invalid, or the rows of the benchmark hold their own chats.
        """
        if self.reader in ("t_eval", "glaive") and route.prompt.mode is not PromptMode.ROW:
            raise ConfigError(
                f"prompt: got {str(route.prompt)!r}, but rows of {self.reader} hold their own chats; set prompt=row"
            )
        return route.prompt

    def published_protocol(self) -> PublishedProtocol | None:
        """Return the numbers of ``protocol: published``, for several agents those of the first. ``None`` for ours.

        Raises:
            ConfigError: AFM's script cannot run an agent.
        """
        if self.protocol == "ours":
            return None
        routes = self.routes()
        for route in routes:
            check_agent(route.declared)
        return PublishedProtocol.of(routes.first.limits)

    def routes(self, *, with_tools: bool = False) -> Routes:
        """Return the agents, each with its limits, tools and rewards.

        Args:
            with_tools: Keep the declared tools despite ``without_tools``.

        Raises:
            ConfigError: An agent does not exist, its declaration is invalid, or entries of ``agents`` contradict each other.
        """
        top = AgentRoute(
            agent=self.agent or None,
            tools=self.tools,
            rewards=self.rewards,
            limits=self.limits,
            prompt=self.prompt,
        )
        bare = self.without_tools and not with_tools
        folder = self.model.folder if self.model is not None else None

        def load(agent: str) -> AgentSpec:
            spec = load_agent(agent) if folder is None else agent_of_model(folder, agent)
            return without_tools(spec) if bare else spec

        return routes_of(top, self.agents, load)

    @property
    def answering(self) -> ModelSettings:
        """The model.

        Raises:
            ConfigError: A team answers.
        """
        if self.model is None:
            raise ConfigError("this evaluation has a team and no model")
        return self.model

    def unseen_roles(self) -> dict[str, UnseenTool]:
        """Return ``unseen_tools`` after a check.

        Raises:
            ConfigError: One of them is no tool role of an agent.
        """
        specs = self.routes().specs
        known = sorted({role for spec in specs for role in spec.tool_roles})
        if unknown := next((role for role in self.unseen_tools if role not in known), None):
            names = " or ".join(repr(spec.name) for spec in specs)
            raise ConfigError(
                f"unseen_tools.{unknown}: agent {names} has no such tool; {suggestion(unknown, known)}"
            )
        return self.unseen_tools

    def choosing(self) -> tuple[BestOfSettings | None, str]:
        """Return how a judge chooses, or ``None`` and the reason: too few rounds, or no judge."""
        if self.best_of is None:
            return None, ""
        sizes, least = tuple(k for k in self.best_of.sizes if k <= self.rounds), min(self.best_of.sizes)
        if not sizes:
            return None, f"best-of-{least} needs {least} rounds, has {self.rounds}"
        if self.best_of.judge.place().url is None:
            names, command = ", ".join(f"best-of-{k}" for k in sizes), f"`afm eval choose {self.output_dir}`"
            return None, f"{names} needs a judge: set GRM_BASE_URL or best_of.judge.url, then {command}"
        return self.best_of.model_copy(update={"sizes": sizes}), ""

    def agreeing(self) -> tuple[AgreementSettings | None, str]:
        """Return the judges that judge again, or ``None`` and the reason."""
        if self.agreement is None:
            return None, ""
        if any(judge.place().url is None for judge in self.agreement.judges):
            what = "agreement needs a judge: set GRM_BASE_URL or agreement.judges[..].url"
            return None, f"{what}, then `afm eval agree {self.output_dir}`"
        return self.agreement, ""

    def tools_in_use(self, route: Route) -> Path | dict[str, Any] | None:
        """Return the tools of an agent, ``None`` with ``without_tools``."""
        return None if self.without_tools else route.tools


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> EvalConfig:
    """Read a YAML of ``afm eval`` and apply ``key=value`` overrides (dots reach into mappings, values are YAML).

    With ``extends: FILE`` in a YAML, mappings are merged and other values replaced. The files that ``extends``,
    ``agent``, ``tools`` and ``rewards`` name in a YAML are relative to it; data, models, ``output_dir`` and every
    override are relative to the working folder.

    Raises:
        ConfigError: A file cannot be read, or a key or value is wrong.
        UsageError: An override is wrong, or no model is given.
    """
    data = read_extended(Path(path), "evaluation settings", anchor=_anchored)
    data |= {"model": {"path": data["model"]}} if isinstance(data.get("model"), str) else {}
    overrides = _team_in_place(data, [_model_path(override) for override in overrides])
    files = [override for override in overrides if override_key(override) in ("tools", "rewards")]
    apply_overrides(data, files)
    for key in ("tools", "rewards"):
        read_in_place(data, key, overrides)
    apply_overrides(data, [override for override in overrides if override not in files])
    known = EvalConfig.model_fields
    unknown = [key for key in data if key not in known]
    if wrong := [key for key in unknown if get_close_matches(key, ["extends", *known], n=1) == ["extends"]]:
        raise ConfigError(f"{path}: {wrong[0]}: unknown key; did you mean 'extends'?")
    if not data.get("model") and not data.get("team") and not unknown:  # a misspelt one may be it
        expected = "name a model (model=DIR_OR_URL) or a team (team=FILE) on the command line"
        raise UsageError(f"{path}: model: missing; {expected}")
    config = validated(EvalConfig, data, str(path), overrides=overrides)
    config.__dict__["recipe_file"] = Path(path)
    return config


def saved_section(folder: Path, key: str, model: type[SectionT], overrides: Sequence[str]) -> SectionT:
    """Return one section of the settings in an evaluation's ``folder``, or its defaults, with overrides of its keys.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong.
        UsageError: An override is wrong.
    """
    file = folder / CONFIG_FILE
    section = dict((read_file(file, "evaluation settings") if file.exists() else {}).get(key) or {})
    apply_overrides(section, overrides)
    return validated(model, section, f"{key} of {file}", overrides=overrides)


def dump_config(config: EvalConfig, folder: Path) -> str:
    """Return the resolved settings as YAML for :func:`load_config`, to be saved in ``folder``."""
    data = config.model_dump(mode="json")
    anchor_routes(data, lambda value: os.path.relpath(value, folder))
    anchor_harness(data, Path())
    if (team := data["team"]) and Path(team["file"]).is_file():
        team["file"] = str(Path(team["file"]).resolve())
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _anchored(data: dict[str, Any], folder: Path) -> None:
    anchor_routes(data, lambda value: os.path.normpath(folder / value))
    if isinstance(team := data.get("team"), str):
        data["team"] = os.path.normpath(folder / team)
    anchor_harness(data, folder)


def _team_in_place(data: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Put ``team=FILE`` and ``team.KEY=VALUE`` into ``data``, in place of a model. Return the other overrides."""
    files = [text for text in overrides if override_key(text) == "team"]
    changes = [text.strip()[len("team.") :] for text in overrides if override_key(text).startswith("team.")]
    if files:
        data["team"] = {"file": files[-1].partition("=")[2].strip()}
        data.pop("model", None)
    if changes:
        team = data.get("team")
        if not team:
            raise UsageError(f"team.{changes[0]}: changes the file of a team; also set team=FILE")
        team = {"file": team} if isinstance(team, str) else team
        data["team"] = team | {"changes": [*team.get("changes", ()), *changes]}
    return [text for text in overrides if override_key(text).partition(".")[0] != "team"]


def _model_path(override: str) -> str:
    """Expand ``model=DIR`` to ``model.path=DIR``."""
    key, sign, value = override.partition("=")
    short = sign and key.strip() == "model" and not value.lstrip().startswith("{")
    return f"model.path={value}" if short else override
