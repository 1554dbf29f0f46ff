"""The settings of ``afm rl``, a YAML without unknown keys, and the unfinished episodes that a run can leave out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from afm.agents import AgentSpec, LimitOverrides, agent_of_model, load_agent, model_folder
from afm.agents.prompt_record import record_of_model
from afm.configuration import (
    OneOrMany,
    Settings,
    apply_overrides,
    override_key,
    read_extended,
    read_in_place,
    validated,
)
from afm.errors import ConfigError, UsageError
from afm.harness.settings import HarnessSettings, anchor_harness
from afm.presets import take_preset
from afm.rollout import Episode
from afm.rollout.routes import AgentRoute, AgentRoutes, Routes, anchor_routes, routes_of
from afm.trajectory.record import StopReason
from verl_ext.alarms import Alarms
from verl_ext.curriculum import Curriculum
from verl_ext.group_guard import ShortBatch
from verl_ext.teacher import TeacherChoice

CUT_SHORT = {
    StopReason.TURNS,
    StopReason.AGENT_TOKENS,
    StopReason.RESPONSE_TOKENS,
    StopReason.SECONDS,
    StopReason.TOOL_SECONDS,
    StopReason.ABORTED,
}


class Unfinished(StrEnum):
    """Episodes that ``leave_out`` can remove from training: from the loss and from the mean of their group."""

    TRUNCATED = "truncated"
    """A limit on turns, tokens or time ended the episode (DAPO's overlong filtering, arXiv 2503.14476, section 3.4)."""
    VOID = "void"
    """The episode ended without a call or an answer (void turns of SimpleTIR, arXiv 2509.02479)."""
    FAILED = "failed"
    """A tool failed, or the engine aborted the generation, which is not the agent's fault."""


def unfinished(episode: Episode) -> set[Unfinished]:
    """Return why an episode is not a fair sample, empty for a fair one."""
    reasons = set()
    if episode.stop in CUT_SHORT - {StopReason.ABORTED}:
        reasons.add(Unfinished.TRUNCATED)
    if episode.stop in (StopReason.END_OF_TEXT, StopReason.FORGED_OBSERVATION):
        reasons.add(Unfinished.VOID)
    if episode.stop is StopReason.ABORTED or episode.cost.tool_failures:
        reasons.add(Unfinished.FAILED)
    return reasons


SETTINGS_FILE = "rl_config.yaml"
"""File of the resolved settings in the output folder, which worker processes read."""


_SECTIONS_OF_VERL = frozenset({"actor_rollout_ref", "algorithm", "critic", "data", "ray_init", "trainer"})
_INSIDE_ACTOR = frozenset({"actor", "ref", "rollout"})
"""Sections of ``actor_rollout_ref``, which people leave out."""
_KEYS_OF_TRAINER = frozenset({"nnodes", "n_gpus_per_node", "total_epochs", "total_training_steps"})
_SCRIPT_VARIABLES = {
    "BASE_MODEL": "model=DIR",
    "TRAIN_DATASETS": "train_files=FILE",
    "VAL_DATASETS": "val_files=FILE",
    "SAVE_MODEL_FOLDER": "output_dir=DIR",
    "EXPERIMENT_NAME": "output_dir=DIR, which names the run",
    "NNODES": "verl.trainer.nnodes=N",
    "reward_model.reward_manager": "rewards=FILE (docs/rewards.md)",
    "custom_reward_function.train_path": "rewards=FILE with a scorer of your own (docs/tutorials/own_reward.md)",
    "AFM_reward_fn.format_fn_type": "rewards.formula='correct * format'",
}
"""Names in AFM's training scripts, and what to write instead."""
_NAMES_OF_SFT = {
    **dict.fromkeys(("learning_rate", "lr"), "verl.actor_rollout_ref.actor.optim.lr"),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "per_device_train_batch_size"), "verl.data.train_batch_size"
    ),
    **dict.fromkeys(("max_steps", "steps"), "verl.trainer.total_training_steps"),
    **dict.fromkeys(("num_train_epochs", "epochs"), "verl.trainer.total_epochs"),
    "save_steps": "verl.trainer.save_freq",
    "nodes": "verl.trainer.nnodes",
    "gpus": "verl.trainer.n_gpus_per_node",
    "lora_rank": "verl.actor_rollout_ref.model.lora_rank",
    "nproc_per_node": "verl.trainer.n_gpus_per_node",
    "temperature": "verl.actor_rollout_ref.rollout.temperature",
    "model_name_or_path": "model",
    "max_response_length": "limits.max_response_tokens",
    "max_prompt_length": "verl.data.max_prompt_length",
}
"""Names of other trainers, and the key to write instead."""


class EpisodeSettings(Settings):
    """The settings of an episode, which are all that a user of stock verl writes."""

    agent: str = ""
    """The agent: the name of a shipped one, or the path of a YAML."""
    agents: AgentRoutes = Field(default_factory=dict)
    """Maps rows to agents, for data sets with rows of several agents."""
    model: str = ""
    """Folder of the model or of a finished run, or its name on the hub. An ``agent.yaml`` in the folder replaces the
    shipped agent of that name."""
    prompt: str = "own"
    """Prompt of each question: ``own`` (the agent's), ``row`` (the row's, unchanged) or a file with
    ``{question}``. See docs/prompts.md."""
    tools: Path | dict[str, Any] | None = None
    """Path of a tool YAML, or its content. Leave it out for an agent without tools."""
    rewards: Path | dict[str, Any] | None = None
    """Path of a reward YAML, or its content. The default is the built-in table by data source."""
    limits: LimitOverrides = Field(default_factory=dict)
    """Overrides of the agent's limits."""
    leave_out: tuple[Unfinished, ...] = ()
    """Unfinished episodes to exclude from training and from their group's mean: ``truncated`` (a limit ended
    them), ``void`` (no call, no answer), ``failed`` (a tool or the engine failed). A validation counts all of
    them."""
    harness: HarnessSettings | None = None
    """A program of your own, or a team, is the agent: ``command`` or ``team``, ``reward``, ``credit``, ``by_member``,
    ``timeout_s``, ``retries``, ``concurrency``, ``max_output_bytes``, ``environment``, ``sandbox``. See
    docs/harness.md."""
    teacher: TeacherChoice | None = None
    """Distils from a teacher: the advantage of each token is the teacher's log-probability minus the student's, and
    rewards are only reported. Keys: ``model`` (folder or address), ``name``, ``clip``."""
    mask_observations: bool = True
    """``false`` also trains on what the environment wrote, to measure the effect of the mask."""
    episodes_per_step: int = Field(default=8, ge=0)
    """Approximate number of episodes to keep per step (``episodes/step_000001.jsonl``), with the advantages
    of the trained ones (``step_000001.advantages.json``). The same share of a validation is kept, with
    ``validation: true`` in ``provenance``."""
    seed: int = 0
    """Seeds the order of the prompts and, on the CPU engine, every sampled token."""
    output_dir: Path | None = None
    """Folder for everything that the run writes: metrics, log, episodes, failures, checkpoints, model."""

    @model_validator(mode="after")
    def _some_agent(self) -> EpisodeSettings:
        if not self.agent and not self.agents:
            raise ValueError("agent: missing, but required")
        if self.harness is not None and (self.agents or self.tools is not None):
            raise ValueError(
                "harness: the program brings its own agent and tools; remove `agents` and `tools`. `agent` only sets "
                "the form in which its answers are judged"
            )
        return self

    def spec(self) -> AgentSpec:
        """Return the agent with the limits of these settings, the first one if there are several.

        Raises:
            ConfigError: The agent does not exist or its declaration is wrong.
        """
        return self.routes().first.spec

    def routes(self) -> Routes:
        """Return the agents, each with its limits, tools, rewards and prompts.

        With ``prompt: row``, a row without a prompt gets the prompt of the model's training, if that used a single one.

        Raises:
            ConfigError: An agent does not exist, its declaration is wrong, or entries of ``agents`` contradict each other.
        """
        top = AgentRoute(
            agent=self.agent or None,
            tools=self.tools,
            rewards=self.rewards,
            limits=self.limits,
            prompt=self.prompt,
        )
        routes = routes_of(top, self.agents, self._declared)
        trained = record_of_model(self.model)
        return routes.filled_by(trained.the_one if trained else None)

    def _declared(self, agent: str) -> AgentSpec:
        return agent_of_model(self.model, agent) if self.model else load_agent(agent)


class RlSettings(EpisodeSettings):
    """The settings of ``afm rl``."""

    model: str
    output_dir: Path
    prompt_check: bool = True
    """``false`` allows other prompts than the model was trained with."""
    platform: Literal["cpu", "gpu"] = "gpu"
    """``cpu`` adds the CPU platform and rollout engine; ``gpu`` leaves both to verl."""
    train_files: OneOrMany[str] = Field(min_length=1)
    """Parquet files with one question per row, as ``afm data prepare rl`` writes them."""
    val_files: OneOrMany[str] = ()
    """Files for verl's own validation. The default is the training files."""
    short_batch: ShortBatch = ShortBatch.STOP
    """What to do when ``algorithm.filter_groups.max_num_gen_batches`` did not fill a batch: ``stop``, or ``fill`` it with
    groups without a signal. If no group has a signal and most are solved, ``fill`` first generates four times as much."""
    max_failed_episodes: int | None = Field(default=None, ge=0)
    """Episodes of a step or a validation that may fail before the run ends. Examples of a failure are an
    unreadable row and an error in a tool's code. The default is 1 % of a step's episodes, at least 1. Failed
    episodes have no score, are not trained on, and are listed in ``failures.jsonl``. An error of the engine
    ends the run at once."""
    curriculum: Curriculum | None = None
    """``{}`` draws questions by their solve rate. Without it, each question comes once per epoch."""
    alarms: Alarms = Alarms()
    """Metrics to watch, and what to do when one is out of bounds."""
    trackers: tuple[Literal["tensorboard", "wandb", "swanlab"], ...] = ()
    """Any of ``tensorboard``, ``wandb``, ``swanlab``. They write below ``output_dir``. The last two are
    offline unless ``WANDB_API_KEY`` or ``SWANLAB_API_KEY`` is set in the environment."""
    ray_address: str | None = None
    """Address of a running Ray cluster to join. Without it the run starts its own."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for Ray to start the trainer, and then its workers. After that the run ends with an error that
    lists what is missing and what the nodes have left."""
    loss_grace_s: float = Field(default=30.0, ge=0)
    """Seconds for a trainer that lost a process or a node to end by itself before it is killed. verl alone
    would wait for a dead worker's episodes forever."""
    weight_proof: bool = True
    """Compares the rollout engine's weights with the trainer's after every sync, and ends the run at a
    difference. See docs/rl.md."""
    published: dict[str, Any] | None = None
    """Settings that ``preset=script|paper`` merged in, kept as a record (docs/parity.md)."""
    verl: dict[str, Any] = Field(default_factory=dict)
    """verl's own configuration, nested. It is checked against verl, and may also set fields of verl's
    dataclasses that verl's YAML leaves out. ``trainer.total_training_steps`` cannot exceed what
    ``trainer.total_epochs`` yield. ``trainer.resume_mode`` is always ``auto``."""

    @field_validator("ray_address")
    @classmethod
    def _host_and_port(cls, value: str | None) -> str | None:
        if value not in (None, "auto") and not re.fullmatch(
            r"(\w+://)?(\[\S+\]|[^\s:/]+):\d{1,5}", value or ""
        ):
            raise ValueError("HOST:PORT of the cluster's head, for example 10.0.0.1:6379")
        return value

    @field_validator("model")
    @classmethod
    def _model_of_a_run(cls, value: str) -> str:
        inner = model_folder(value)
        return str(inner) if inner != Path(value) else value


_RUN = {"model", "output_dir", "train_files"}


def load_settings(path: str | Path, overrides: Sequence[str] = ()) -> RlSettings:
    """Read a YAML of ``afm rl`` and apply ``key=value`` overrides (keys may be dotted, values are YAML).

    ``preset=script|paper`` first merges published settings into the recipe (:mod:`afm.presets`).

    Paths of ``agent``, ``tools``, ``rewards`` and ``extends`` in the YAML are relative to the YAML. All other paths, and
    those in overrides, are relative to the working folder.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong.
        UsageError: An override is wrong.
    """
    data = read_extended(Path(path), "afm rl settings", anchor=_anchor)
    _refuse_bare_keys_of_verl(overrides)
    overrides, preset = take_preset(data, "rl", Path(path), overrides)
    if preset is not None:
        data["published"] = preset.as_dict()
    for key in ("tools", "rewards"):
        read_in_place(data, key, overrides)
    apply_overrides(data, overrides)
    if not _RUN & data.keys() and data.keys() <= RlSettings.model_fields.keys():
        raise ConfigError(
            f"{path}: is a part of a run, without {', '.join(sorted(_RUN))}; add it to a recipe in a YAML of your own: "
            f"`extends: [RECIPE.yaml, {path}]`"
        )
    settings = validated(RlSettings, data, str(path), overrides=overrides)
    settings.__dict__["recipe_file"] = Path(path)
    return settings


def _refuse_bare_keys_of_verl(overrides: Sequence[str]) -> None:
    """Raise for a key of AFM's scripts, or a key of verl without its prefix, with the key to write instead."""
    for override in overrides:
        plain = override.lstrip("+ ").removeprefix("--")
        head, _, _ = plain.partition(".")
        inside = head in _INSIDE_ACTOR
        bare = inside or head in _SECTIONS_OF_VERL
        key = override_key(plain if bare or override.startswith("--") else override)
        if key in _SCRIPT_VARIABLES:
            raise UsageError(
                f"override {override!r}: {key} belongs to AFM's scripts; here: {_SCRIPT_VARIABLES[key]}"
            )
        if key.isupper():
            advice = f"write it before the command: {key}=VALUE afm rl ..."
            raise UsageError(f"override '{key}=...': {key} is not a setting; {advice}")
        if inside and (name := _NAMES_OF_SFT.get(key.rpartition(".")[2])):
            value = override.partition("=")[2] or "VALUE"
            raise UsageError(f"override {override!r}: {key} is a key of verl; write {name}={value}")
        if bare or key in _KEYS_OF_TRAINER:
            full = (
                f"trainer.{override}"
                if key in _KEYS_OF_TRAINER
                else ("actor_rollout_ref." if inside else "") + plain
            )
            sign = "+" if override.strip().startswith("+") else ""
            raise UsageError(f"override {override!r}: {key} is a key of verl; write {sign}verl.{full}")
        own = get_close_matches(key.partition(".")[0], RlSettings.model_fields, n=1)
        if key in _NAMES_OF_SFT or not own:
            for name in get_close_matches(key, _NAMES_OF_SFT, n=1):
                value = override.partition("=")[2] or "VALUE"
                raise UsageError(
                    f"override {override!r}: {key}: unknown key; did you mean {_NAMES_OF_SFT[name]}={value}?"
                )


def load_episode_settings(path: str | Path) -> EpisodeSettings:
    """Read the episode part of a settings file, and ignore other known keys of ``afm rl``.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong.
    """
    data = read_extended(Path(path), "episode settings", anchor=_anchor)
    launcher_keys = set(RlSettings.model_fields) - set(EpisodeSettings.model_fields)
    own = {key: value for key, value in data.items() if key not in launcher_keys}
    return validated(EpisodeSettings, own, str(path))


def agents_of_rows(dataset: Any, path: str | Path) -> list[str]:
    """Return the agent of each row of verl's data set, as its key in ``agents:`` of a settings file."""
    routes = load_episode_settings(path).routes()
    sources = dataset.dataframe["data_source"]
    with_abilities = "ability" in dataset.dataframe.column_names
    abilities = dataset.dataframe["ability"] if with_abilities else [""] * len(sources)
    return [routes.of(source, ability or "").name for source, ability in zip(sources, abilities, strict=True)]


def _anchor(data: dict[str, Any], folder: Path) -> None:
    """Resolve paths in a YAML, except those of data and models, relative to the YAML's folder."""
    anchor_routes(data, lambda value: str(folder / value))
    anchor_harness(data, folder)


def as_plain(settings: BaseModel) -> dict[str, Any]:
    """Return settings as JSON-like data for a file, without unset values."""
    data = settings.model_dump(mode="json")
    return {key: value for key, value in data.items() if value is not None}
