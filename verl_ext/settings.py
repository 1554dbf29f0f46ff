"""The settings of ``afm rl``: one YAML, refused at the first unknown key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from afm.agents import AgentSpec, Limits, agent_of_model, load_agent
from afm.configuration import apply_overrides, read_extended, read_in_place, validated
from afm.errors import suggestion
from verl_ext.alarms import Alarms
from verl_ext.curriculum import Curriculum
from verl_ext.guard import ShortBatch
from verl_ext.unfinished import Unfinished

SETTINGS_FILE = "rl_config.yaml"
"""The resolved settings, written into the output folder; worker processes read them there."""


class EpisodeSettings(BaseModel):
    """What an episode needs: this part is all that a user of stock verl has to write.

    Attributes:
        agent: Name of a shipped agent, or path of a YAML.
        model: Folder of the model; an agent declared there (``agent.yaml``) wins over the shipped one.
        tools: Path of a tool YAML, or its content; ``None`` for an agent without tools.
        rewards: Path of a reward YAML, or its content; ``None`` is the default table by data source.
        limits: Overrides of the agent's limits.
        leave_out: Episodes that are neither trained on nor counted in their group's mean: ``truncated`` (a limit ended
            them), ``void`` (no call, no answer), ``failed`` (a tool or the engine did not work); none by default. A
            validation counts them all.
        mask_observations: ``False`` also trains on what the environment wrote: for showing what the mask is worth.
        episodes_per_step: About so many episodes of each step are kept to be read (``episodes/step_000001.jsonl``), and the same
            share of a validation's, with ``validation: true`` in their provenance.
        seed: Seeds prompts' order and, on the CPU engine, every sampled token.
        output_dir: Where failed episodes are listed (``failures.jsonl``) and episodes are kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    agent: str
    model: str = ""
    tools: Path | dict[str, Any] | None = None
    rewards: Path | dict[str, Any] | None = None
    limits: dict[str, Any] = Field(default_factory=dict)
    leave_out: tuple[Unfinished, ...] = ()
    mask_observations: bool = True
    episodes_per_step: int = Field(default=8, ge=0)
    seed: int = 0
    output_dir: Path | None = None

    @field_validator("limits")
    @classmethod
    def _known_limits(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key not in Limits.model_fields:
                raise ValueError(f"unknown limit {key!r}; {suggestion(key, Limits.model_fields)}")
        Limits.model_validate(value)
        return value

    def spec(self) -> AgentSpec:
        """The agent, with the limits of these settings.

        Raises:
            ConfigError: No such agent, or a bad declaration.
        """
        spec = agent_of_model(self.model, self.agent) if self.model else load_agent(self.agent)
        limits = Limits.model_validate({**spec.limits.model_dump(), **self.limits})
        return spec.model_copy(update={"limits": limits})


class RlSettings(EpisodeSettings):
    """Everything ``afm rl`` needs.

    Attributes:
        platform: ``cpu`` adds the CPU platform and rollout engine; ``gpu`` leaves both to ``verl``.
        train_files: Parquet files with one question a row.
        val_files: The same for verl's own validation; the training files when empty.
        short_batch: What to do when ``algorithm.filter_groups.max_num_gen_batches`` did not fill a batch.
        max_failed_episodes: How many episodes of a step may fail (a row that cannot be read, an error of ours or of a tool's code)
            before the run ends; unless given, 1 % of a step's, at least 1. They have no score, so they are not trained on, and
            stand in ``failures.jsonl``. An error of the engine ends the run at once.
        curriculum: Draw questions by how often they are solved; see :mod:`verl_ext.curriculum`.
        alarms: When metrics give cause for worry, and what happens then; see :mod:`verl_ext.alarms`.
        trackers: Where metrics go beside ``metrics.jsonl``; each writes below ``output_dir``. W&B and SwanLab are offline
            unless ``WANDB_API_KEY`` or ``SWANLAB_API_KEY`` is in the environment.
        ray_address: Join this running Ray cluster; ``None`` starts one for this run alone.
        start_timeout_s: How long Ray may take to start the trainer, and then its workers, before the run ends and says what is
            missing.
        loss_grace_s: How long after the loss of a process or a node the trainer may take to end by itself.
        verl: verl's own configuration, nested; see :mod:`verl_ext.compose`.
    """

    model: str
    output_dir: Path
    platform: Literal["cpu", "gpu"] = "gpu"
    train_files: tuple[str, ...] = Field(min_length=1)
    val_files: tuple[str, ...] = ()
    short_batch: ShortBatch = ShortBatch.STOP
    max_failed_episodes: int | None = Field(default=None, ge=0)
    curriculum: Curriculum | None = None
    alarms: Alarms = Alarms()
    trackers: tuple[Literal["tensorboard", "wandb", "swanlab"], ...] = ()
    ray_address: str | None = None
    start_timeout_s: float = Field(default=600.0, gt=0)
    loss_grace_s: float = Field(default=30.0, ge=0)
    verl: dict[str, Any] = Field(default_factory=dict)

    @field_validator("train_files", "val_files", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


def load_settings(path: str | Path, overrides: Sequence[str] = ()) -> RlSettings:
    """Read a YAML of ``afm rl`` and apply ``key=value`` overrides (keys may be dotted, values are YAML).

    The files that ``agent``, ``tools``, ``rewards`` and ``extends`` name in the YAML are relative to it;
    everything else, and every override, to the working folder.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong.
        UsageError: An override is wrong.
    """
    data = read_extended(Path(path), "afm rl settings", anchor=_anchor)
    for key in ("tools", "rewards"):
        read_in_place(data, key, overrides)
    apply_overrides(data, overrides)
    return validated(RlSettings, data, str(path), overrides=overrides)


def load_episode_settings(path: str | Path) -> EpisodeSettings:
    """Read the episode part of a settings file (other known keys of ``afm rl`` are left alone).

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong.
    """
    data = read_extended(Path(path), "episode settings", anchor=_anchor)
    launcher_keys = set(RlSettings.model_fields) - set(EpisodeSettings.model_fields)
    own = {key: value for key, value in data.items() if key not in launcher_keys}
    return validated(EpisodeSettings, own, str(path))


def _anchor(data: dict[str, Any], folder: Path) -> None:
    """Files that a YAML names, data and models aside, are relative to it."""
    for key in ("agent", "tools", "rewards"):
        value = data.get(key)
        if isinstance(value, str) and (key != "agent" or value.endswith((".yaml", ".yml"))):
            data[key] = str(folder / value)


def as_plain(settings: BaseModel) -> dict[str, Any]:
    """JSON-like form of settings, for writing them to a file."""
    data = settings.model_dump(mode="json")
    return {key: value for key, value in data.items() if value is not None}
