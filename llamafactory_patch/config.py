"""From a YAML file and overrides to the exact configuration LLaMA-Factory receives."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec, PromptMode, PromptSource, load_agent
from afm.configuration import apply_overrides, override_key, read_extended
from afm.errors import ConfigError, UsageError, suggestion
from afm.presets import take_preset
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
        config: LLaMA-Factory's keys and those of :class:`llamafactory_patch.arguments.AgentArguments`.
        output_dir: Where the model and everything about its training goes.
        agent: The agent that is trained, if the configuration names one.
        threads: CPU threads per process, ``None`` for the engine's choice.
        published: What ``preset=script|paper`` laid over the recipe.
    """

    config: dict[str, Any]
    output_dir: Path
    agent: AgentSpec | None
    threads: int | None
    published: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """What the trained model depends on, to compare two runs by."""
        kept = {key: value for key, value in self.config.items() if key not in _WITHOUT_INFLUENCE}
        kept |= {"published": self.published} if self.published else {}
        prompt = self.prompt
        asked = {} if prompt.mode is PromptMode.OWN else {"prompt": prompt.told}
        return kept | ({"agent": self.agent.digest} if self.agent else {}) | asked

    @property
    def prompt(self) -> PromptSource:
        """What the rows of the agent are asked with."""
        return PromptSource.load(self.config.get("prompt", PromptMode.OWN.value))


_SECRETS = {
    "hf_hub_token": "set the environment variable HF_TOKEN",
    "hub_token": "set the environment variable HF_TOKEN",
    "ms_hub_token": "log in once with `modelscope login`",
    "om_hub_token": "log in once with openMind's own command",
    "swanlab_api_key": "set the environment variable SWANLAB_API_KEY",
    "swanlab_lark_secret": "start with `llamafactory-patch-cli train CONFIG`, which saves none",
    "swanlab_lark_webhook_url": "start with `llamafactory-patch-cli train CONFIG`, which saves none",
}
"""Keys that hold secrets, and what to do instead."""

_SCRIPT_VARIABLES = {
    "DATA_DATA": "dataset=NAME",
    "MODEL_PATH": "model_name_or_path=DIR",
    "OUTPUT_DIR": "output_dir=DIR",
    "OUTPUT_DIR_BASE": "output_dir=DIR",
    "LEARNING_RATE": "learning_rate=1.4e-5",
    "LEARNING_RATES": "one learning_rate=... and output_dir=... for each run",
    "WARMUP_RATIOS": "one warmup_steps=... and output_dir=... for each run",
    "BATCH_SIZE": "per_device_train_batch_size=1",
    "BATCH_SIZES": "one per_device_train_batch_size=... and output_dir=... for each run",
    "GRADIENT_ACCUMULATION": "gradient_accumulation_steps=16",
    "GRADIENT_ACCUMULATIONS": "one gradient_accumulation_steps=... and output_dir=... for each run",
    "EPOCHS": "num_train_epochs=4",
    "CUTOFF_LEN": "cutoff_len=32768",
    "TEMPALTE": "template=qwen",
    "PRECISION": "bf16=true",
    "SWANLAB_API_KEY": "the environment variable SWANLAB_API_KEY",
    "SWANLAB_PROJECT": "use_swanlab=true swanlab_project=NAME",
}
"""Variables of AFM's training scripts, and what to write here."""

_WITHOUT_INFLUENCE = frozenset(
    {"disable_tqdm", "logging_steps", "output_dir", "overwrite_output_dir", "plot_loss", "report_to"}
    | {"resume_from_checkpoint", "save_steps", "save_strategy", "save_total_limit", "run_name"}
    | {"record_agent", "prompt", "prompt_check"}  # the agent's digest counts, and that of the prompt's text
    | {
        "use_swanlab",
        "swanlab_mode",
        "swanlab_project",
        "swanlab_workspace",
        "swanlab_run_name",
        "swanlab_logdir",
    }
)


def resolve(config_path: str | Path, overrides: Sequence[str] = ()) -> SftJob:
    """Read a configuration and apply ``key=value`` overrides (values are YAML, dots reach into mappings).

    The files that ``agent``, ``deepspeed`` and ``fsdp_config`` name in the YAML are relative to it, all else to the
    working folder. ``fsdp_config`` alone shards everything (``fsdp: full_shard auto_wrap``).
    ``agent: NAME_OR_PATH`` switches the author mask on for the tag that agent's environment writes, and
    has the template checked against the tokenizer's chat template; both can be set explicitly.
    ``preset=script|paper`` lays published settings over the recipe first; see :mod:`afm.presets`.

    Raises:
        ConfigError: No such file, bad YAML, an unknown key, or settings that contradict each other.
        UsageError: An override is wrong.
    """
    config = read_extended(Path(config_path), "training arguments", anchor=_anchor_paths)
    overrides, preset = take_preset(config, "sft", Path(config_path), overrides)
    apply_overrides(config, overrides)
    _checked(config, config_path, overrides)
    output_dir = config.get("output_dir")
    if not isinstance(output_dir, str) or not output_dir:
        raise ConfigError(f"{config_path}: output_dir: got {output_dir!r}, expected a folder; output_dir=DIR")
    threads = config.pop("threads", None)
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise ConfigError(f"{config_path}: threads: got {threads!r}, expected a positive number")
    agent_name = config.pop("agent", None)
    if not isinstance(agent_name, str | None):
        raise ConfigError(f"{config_path}: agent: got {agent_name!r}, expected a name or the path of a YAML")
    agent = load_agent(agent_name) if agent_name is not None else None
    if config.get("resume_from_checkpoint") is None:
        config.pop("resume_from_checkpoint", None)  # stock configurations say null where they mean nothing
    if agent_name is not None:
        config.setdefault("record_agent", _named(agent_name))
    config = {"stage": "sft", "do_train": True, **config}
    if config.get("fsdp_config"):
        config.setdefault("fsdp", "full_shard auto_wrap")
    _check_contradictions(config, config_path)
    _check_prompt(config, config_path)
    if agent is not None:
        config = _with_agent(config, agent, config_path)
    return SftJob(config, Path(output_dir), agent, threads, preset.as_dict() if preset else {})


def _named(agent: str | Path) -> str:
    """A shipped agent's name, or a path that holds in any working folder."""
    return str(Path(agent).resolve()) if str(agent).endswith((".yaml", ".yml")) else str(agent)


def _with_agent(config: dict[str, Any], agent: AgentSpec, config_path: str | Path) -> dict[str, Any]:
    defaults: dict[str, Any] = {"match_chat_template": True, "ignore_observation": True}
    if agent.observation_role is not None:
        defaults["ignore_observation_token"] = agent.observation_role
    config = {**defaults, **config}
    tags = names_in(config.get("ignore_observation_token"))
    if agent.observation_role is not None and agent.observation_role not in tags:
        raise ConfigError(
            f"{config_path}: ignore_observation_token: got {config['ignore_observation_token']!r}, but the "
            f"environment of agent {agent.name!r} writes {agent.observation_role!r}; leave the key out"
        )
    for silent in names_in(config.get("roles_without_loss")):
        if silent and silent not in agent.roles:
            raise ConfigError(
                f"{config_path}: roles_without_loss: agent {agent.name!r} has no role {silent!r}; "
                f"{suggestion(silent, agent.roles)}"
            )
    return config


def _check_contradictions(config: Mapping[str, Any], config_path: str | Path) -> None:
    if config.get("deepspeed") and config.get("fsdp"):
        raise ConfigError(
            f"{config_path}: deepspeed and fsdp are both set; switch one off with deepspeed= or fsdp= fsdp_config="
        )
    for key in _SECRETS:
        if config.get(key):
            raise ConfigError(
                f"{config_path}: {key}: a secret would end up in saved configurations; leave the key out and "
                f"{_SECRETS[key]}"
            )


def _check_prompt(config: dict[str, Any], config_path: str | Path) -> None:
    """Refuse a prompt that cannot be used; a file's path will hold in any working folder."""
    if "prompt" not in config:
        return
    try:
        source = PromptSource.load(config["prompt"])
    except ConfigError as error:
        raise ConfigError(f"{config_path}: {error}") from None
    if source.mode is PromptMode.FILE and "record_agent" not in config:
        raise ConfigError(
            f"{config_path}: prompt: a file needs `agent`, which says whose rows are asked with it"
        )
    if source.mode is PromptMode.FILE:
        config["prompt"] = str(Path(source.path).resolve())


def _anchor_paths(config: dict[str, Any], folder: Path) -> None:
    for key, suffix in (("agent", ".yaml"), ("deepspeed", ".json"), ("fsdp_config", ".json")):
        value = config.get(key)
        if isinstance(value, str) and value.endswith(suffix):
            config[key] = os.path.normpath(folder / value)


def _checked(config: Mapping[str, Any], config_path: str | Path, overrides: Sequence[str]) -> None:
    """Refuse unknown keys, and words where LLaMA-Factory needs numbers, before it spends a minute on them."""
    known = engine_keys()
    typed = {override_key(override).split(".")[0]: override for override in overrides}
    for key, value in config.items():
        if key in OWN_KEYS:
            continue
        kind = known.get(key)
        if key in _SCRIPT_VARIABLES and key not in known:
            fault = f"{key} belongs to AFM's scripts; here: {_SCRIPT_VARIABLES[key]}"
        elif key not in known:
            close = suggestion(key, [*known, *OWN_KEYS])
            hint = close if close.startswith("did you mean") else "see LLaMA-Factory's training arguments"
            fault = f"unknown key {key!r}; {hint}"
        elif kind is not None and not kind.holds(value):
            fault = f"{key}: got {value!r}, expected {kind.words}"
        else:
            continue
        if key in typed:
            raise UsageError(f"override {typed[key]!r}: {fault}")
        raise ConfigError(f"{config_path}: {fault}")


def names_in(value: Any) -> list[str]:
    """Names that a list holds, or a text with commas between."""
    names = value.split(",") if isinstance(value, str) else value or []
    return [str(name).strip() for name in names]


def fsdp_settings(job: SftJob) -> dict[str, Any]:
    """What ``fsdp_config`` says, be it a file or a mapping; empty without it.

    Raises:
        ConfigError: The file is missing or is no JSON.
    """
    settings = job.config.get("fsdp_config") or {}
    if isinstance(settings, dict):
        return settings
    try:
        return dict(json.loads(Path(settings).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"fsdp_config: {settings} cannot be read as JSON: {error}") from None
