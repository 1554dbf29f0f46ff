"""From a YAML file and overrides to the exact configuration LLaMA-Factory receives."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from afm.agents import AgentSpec, load_agent
from afm.errors import ConfigError, UsageError, suggestion
from llamafactory_patch.keys import engine_keys

OWN_KEYS = {
    "agent": "name or YAML of the agent that is trained; saved beside the model",
    "threads": "CPU threads of each training process",
}
"""Keys of a configuration that LLaMA-Factory never sees."""


@dataclass(frozen=True, slots=True)
class SftJob:
    """One training, resolved.

    Attributes:
        config: What LLaMA-Factory receives.
        output_dir: Where the model and everything about its training goes.
        agent: The agent that is trained, if the configuration names one.
        threads: CPU threads per process, ``None`` for the engine's choice.
    """

    config: dict[str, Any]
    output_dir: Path
    agent: AgentSpec | None
    threads: int | None

    def settings(self) -> dict[str, Any]:
        """What the trained model depends on, to compare two runs by."""
        kept = {key: value for key, value in self.config.items() if key not in _WITHOUT_INFLUENCE}
        return kept | ({"agent": self.agent.digest} if self.agent else {})


_WITHOUT_INFLUENCE = frozenset(
    {"disable_tqdm", "logging_steps", "output_dir", "overwrite_output_dir", "plot_loss", "report_to"}
    | {"resume_from_checkpoint", "save_steps", "save_strategy", "save_total_limit", "run_name"}
)


def resolve(config_path: str | Path, overrides: Sequence[str] = ()) -> SftJob:
    """Read a configuration and apply ``key=value`` overrides (values are YAML, dots reach into mappings).

    The files that ``agent`` and ``deepspeed`` name in the YAML are relative to it, all else to the working folder.
    ``agent: NAME_OR_PATH`` switches the author mask on for the tag that agent's environment writes, and
    has the template checked against the tokenizer's chat template; both can be set explicitly.

    Raises:
        ConfigError: No such file, bad YAML, an unknown key, or settings that contradict each other.
        UsageError: An override that is no ``key=value``.
    """
    config = _read(Path(config_path))
    _anchor_paths(config, Path(config_path).parent)
    for override in overrides:
        _apply(config, override)
    known = engine_keys() | OWN_KEYS.keys()
    for key in config:
        if key not in known:
            close = suggestion(key, known)
            hint = close if close.startswith("did you mean") else "see LLaMA-Factory's training arguments"
            raise ConfigError(f"{config_path}: unknown key {key!r}; {hint}")
    output_dir = config.get("output_dir")
    if not isinstance(output_dir, str) or not output_dir:
        raise ConfigError(f"{config_path}: output_dir: got {output_dir!r}, expected a folder; output_dir=DIR")
    threads = config.pop("threads", None)
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise ConfigError(f"{config_path}: threads: got {threads!r}, expected a positive number")
    agent_name = config.pop("agent", None)
    agent = load_agent(agent_name) if agent_name is not None else None
    config = {"stage": "sft", "do_train": True, **config}
    if agent is not None:
        config = _with_agent(config, agent, config_path)
    return SftJob(config, Path(output_dir), agent, threads)


def _with_agent(config: dict[str, Any], agent: AgentSpec, config_path: str | Path) -> dict[str, Any]:
    defaults: dict[str, Any] = {"match_chat_template": True, "ignore_observation": True}
    if agent.observation_role is not None:
        defaults["ignore_observation_token"] = agent.observation_role
    config = {**defaults, **config}
    tags = str(config.get("ignore_observation_token", "")).split(",")
    if agent.observation_role is not None and agent.observation_role not in map(str.strip, tags):
        raise ConfigError(
            f"{config_path}: ignore_observation_token: got {config['ignore_observation_token']!r}, but the "
            f"environment of agent {agent.name!r} writes {agent.observation_role!r}; leave the key out"
        )
    return config


class _Loader(yaml.SafeLoader):
    """Reads ``3e-5`` as a number, which YAML 1.1 takes for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z"),
    list("-+.0123456789"),
)


def _parse(text: str) -> Any:
    return yaml.load(text, _Loader)


def _read(path: Path) -> dict[str, Any]:
    try:
        config = _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration; shipped ones are under configs/") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise ConfigError(f"{path}: got {type(config).__name__}, expected a mapping of training arguments")
    return config


def _anchor_paths(config: dict[str, Any], folder: Path) -> None:
    for key, suffix in (("agent", ".yaml"), ("deepspeed", ".json")):
        value = config.get(key)
        if isinstance(value, str) and value.endswith(suffix):
            config[key] = os.path.normpath(folder / value)


def _apply(config: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"override {override!r}: expected key=value, for example learning_rate=1e-5")
    *parents, last = key.strip().split(".")
    target: Any = config
    for name in parents:
        target = target.setdefault(name, {}) if isinstance(target, dict) else None
    if not isinstance(target, dict):
        raise UsageError(f"override {override!r}: {'.'.join(parents)} is no mapping")
    try:
        target[last] = _parse(text) if text else None
    except yaml.YAMLError as error:
        raise UsageError(f"override {override!r}: the value is no YAML: {error}") from None


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """``key: old -> new`` for every setting that differs."""
    keys = sorted(before.keys() | after.keys())
    return tuple(
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in keys
        if before.get(key) != after.get(key)
    )
