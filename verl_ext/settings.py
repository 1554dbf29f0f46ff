"""The settings of ``afm rl``: one YAML, refused at the first unknown key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from afm.agents import AgentSpec, Limits, agent_of_model, load_agent
from afm.errors import ConfigError, UsageError, suggestion

SETTINGS_FILE = "rl_config.yaml"
"""The resolved settings, written into the output folder; worker processes read them there."""


class EpisodeSettings(BaseModel):
    """What an episode needs: this part is all that a user of stock verl has to write.

    Attributes:
        agent: Name of a shipped agent, or path of a YAML.
        model: Folder of the model; an agent declared there (``agent.yaml``) wins over the shipped one.
        tools: Path of a tool YAML; ``None`` for an agent without tools.
        rewards: Path of a reward YAML, or its content; ``None`` is the default table by data source.
        limits: Overrides of the agent's limits.
        seed: Seeds prompts' order and, on the CPU engine, every sampled token.
        output_dir: Where failed episodes are described (``failures.jsonl``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    agent: str
    model: str = ""
    tools: Path | None = None
    rewards: Path | dict[str, Any] | None = None
    limits: dict[str, Any] = Field(default_factory=dict)
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
        ray_address: Join this running Ray cluster; ``None`` starts one for this run alone.
        verl: verl's own configuration, nested; see :mod:`verl_ext.compose`.
    """

    model: str
    output_dir: Path
    platform: Literal["cpu", "gpu"] = "gpu"
    train_files: tuple[str, ...] = Field(min_length=1)
    val_files: tuple[str, ...] = ()
    ray_address: str | None = None
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
        UsageError: An override is not of the form ``key=value``.
    """
    data = _read(Path(path))
    for override in overrides:
        _apply(data, override)
    try:
        return RlSettings.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(str(path), item) for item in error.errors())) from None


def load_episode_settings(path: str | Path) -> EpisodeSettings:
    """Read the episode part of a settings file (other known keys of ``afm rl`` are left alone).

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong.
    """
    data = _read(Path(path))
    own = {key: value for key, value in data.items() if key not in _LAUNCHER_KEYS}
    try:
        return EpisodeSettings.model_validate(own)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(str(path), item) for item in error.errors())) from None


_LAUNCHER_KEYS = set(RlSettings.model_fields) - set(EpisodeSettings.model_fields)


class _Loader(yaml.SafeLoader):
    """Reads ``1e-6`` as a number, as YAML 1.2 and every user do; PyYAML takes it for a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def _yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _read(path: Path, children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A YAML merged over the one it ``extends`` (path relative to itself); lists and values replace."""
    if path.resolve() in children:
        chain = " -> ".join(map(str, (*children, path.resolve())))
        raise ConfigError(f"{path}: `extends` goes in a circle: {chain}")
    try:
        data = _yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: got {type(data).__name__}, expected a mapping of settings")
    _anchor(data, path.parent)
    parent = data.pop("extends", None)
    if parent is None:
        return data
    return _merged(_read(path.parent / str(parent), (*children, path.resolve())), data)


def _anchor(data: dict[str, Any], folder: Path) -> None:
    """Files that a YAML names beside data and models are relative to it: agent, tools, rewards."""
    for key in ("agent", "tools", "rewards"):
        value = data.get(key)
        if isinstance(value, str) and (key != "agent" or value.endswith((".yaml", ".yml"))):
            data[key] = str(folder / value)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        inherited = result.get(key)
        both = isinstance(inherited, dict) and isinstance(value, dict)
        result[key] = _merged(inherited or {}, value) if both else value
    return result


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UsageError(f"override {override!r}: expected key=value, for example seed=1")
    try:
        value = _yaml(text)
    except yaml.YAMLError as error:
        raise UsageError(f"override {override!r}: the value is no YAML: {error}") from None
    *parents, last = key.split(".")
    level = data
    for parent in parents:
        level = level.setdefault(parent, {})
        if not isinstance(level, dict):
            raise UsageError(f"override {override!r}: {parent!r} is a value, not a group of settings")
    level[last] = value


def _explain(path: str, details: ErrorDetails) -> str:
    key = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        return f"{path}: unknown key {key!r}; {suggestion(key, RlSettings.model_fields)}"
    if details["type"] == "missing":
        return f"{path}: {key}: missing"
    message = details["msg"].removeprefix("Value error, ")
    return f"{path}: {key}: got {details['input']!r}: {message}"


def as_plain(settings: Mapping[str, Any] | BaseModel) -> dict[str, Any]:
    """JSON-like form of settings, for writing them to a file."""
    data = settings.model_dump(mode="json") if isinstance(settings, BaseModel) else dict(settings)
    return {key: value for key, value in data.items() if value is not None}
