"""Conversion of our settings to verl's command line: default values, checked composition, quoting."""

from __future__ import annotations

import importlib.util
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

from afm.errors import ConfigError, MissingExtraError, suggestion
from verl_ext.algorithms import BY_MEMBER, CPU_ENGINE, CREDIT
from verl_ext.checkpoints import CHECKPOINT_DIR
from verl_ext.engines import ENGINE, GPU_RELEASES, cpu_defaults
from verl_ext.group_guard import SAMPLER
from verl_ext.settings import SETTINGS_FILE, RlSettings
from verl_ext.teacher import REVERSE_KL

AGENT_LOOP_NAME = "afm_agent"
AGENT_LOOP_FILE = "agent_loop.yaml"
FILTER = "${algorithm.filter_groups}"
_SAVED = "actor_rollout_ref.actor.checkpoint.save_contents"

Flat = dict[str, Any]
"""Maps dotted verl keys to values. A leading ``+`` adds a key that verl's YAML does not declare."""


DERIVED = {
    "data.train_files": "train_files",
    "data.val_files": "val_files",
    "data.seed": "seed",
    "data.max_response_length": "limits.max_response_tokens",
    "data.dataloader_num_workers": "curriculum",
    "actor_rollout_ref.model.path": "model",
    "critic.model.path": "model",
    "trainer.default_local_dir": "output_dir",
    "algorithm.adv_estimator": "teacher",
    "algorithm.filter_groups.enable": "teacher",
    "ray_kwargs.ray_init.address": "ray_address",
}
"""Keys of verl that follow from one of our settings, which is the one to change."""


def base_overrides(settings: RlSettings) -> Flat:
    """Return the verl keys that follow from our settings. The user's ``verl:`` section must not contradict them."""
    out = settings.output_dir.absolute()
    rollout = "actor_rollout_ref.rollout"
    values: Flat = {
        "data.train_files": [str(Path(file).absolute()) for file in settings.train_files],
        "data.val_files": [str(Path(file).absolute()) for file in settings.val_files or settings.train_files],
        "data.seed": settings.seed,
        "actor_rollout_ref.model.path": settings.model,
        "critic.model.path": settings.model,
        f"{rollout}.agent.default_agent_loop": AGENT_LOOP_NAME,
        f"{rollout}.agent.agent_loop_config_path": str(out / AGENT_LOOP_FILE),
        f"+{rollout}.custom.weight_proof": settings.weight_proof,
        "trainer.default_local_dir": str(out / CHECKPOINT_DIR),
        "trainer.resume_mode": "auto",  # metrics, episodes and the export rely on the last checkpoint in output_dir
        "+trainer.afm.start_timeout_s": settings.start_timeout_s,
        "+trainer.afm.loss_grace_s": settings.loss_grace_s,
        "trainer.v1.sampler.custom_sampler.path": SAMPLER,
        "trainer.v1.sampler.custom_sampler.name": "sampler_for",
        "+trainer.v1.sampler.sampler_kwargs.filter_groups": FILTER,
        "+trainer.v1.sampler.sampler_kwargs.train_batch_size": "${data.train_batch_size}",
        "+trainer.v1.sampler.sampler_kwargs.gen_batch_size": "${data.gen_batch_size}",
        "+trainer.v1.sampler.sampler_kwargs.samples_per_prompt": f"${{{rollout}.n}}",
        "+trainer.v1.sampler.sampler_kwargs.output_dir": str(out),
        "+trainer.v1.sampler.sampler_kwargs.short_batch": settings.short_batch.value,
        "+trainer.v1.sampler.sampler_kwargs.max_failed_episodes": settings.max_failed_episodes,
    }
    if settings.curriculum is not None:
        # Workers of the data loader would draw ahead, from outdated solve rates.
        values["data.dataloader_num_workers"] = 0
        for key, value in settings.curriculum.model_dump().items():
            values[f"+data.curriculum.{key}"] = value
        if settings.agents:
            values["+data.curriculum.settings"] = str(out / SETTINGS_FILE)
    if settings.harness is not None:
        values[f"+trainer.{CREDIT}"] = settings.harness.credit.value
        values[f"+trainer.{BY_MEMBER}"] = settings.harness.by_member.value
    if settings.teacher is not None:
        values["algorithm.adv_estimator"] = REVERSE_KL
        values["+algorithm.teacher_clip"] = settings.teacher.clip
        values["algorithm.filter_groups.enable"] = False  # rewards do not select what is trained on
    limit = settings.routes().max_response_tokens
    if limit is not None:
        values["data.max_response_length"] = limit
    return values


def default_overrides(settings: RlSettings) -> Flat:
    """Return the verl keys whose default we change. The ``verl:`` section may change each of them."""
    name = settings.output_dir.absolute().name
    values: Flat = {
        "data.return_raw_chat": True,
        # Our agent loop scores its episodes, so verl's reward workers would only use memory.
        "reward.num_workers": 0,
        "algorithm.filter_groups.max_num_gen_batches": 10,
        # Probabilities of rollout engine and trainer never match exactly: see configs/rl/algorithms/tis.yaml.
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": 2.0,
        "actor_rollout_ref.rollout.multi_turn.enable": True,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        _SAVED: ["model", "optimizer", "extra"],
        "actor_rollout_ref.actor.checkpoint.load_contents": ["model", "optimizer", "extra"],
        "trainer.project_name": "afm",
        "trainer.experiment_name": name,
        "trainer.logger": ["console", "file", *settings.trackers],
        "trainer.val_before_train": False,
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.max_critic_ckpt_to_keep": 2,
    }
    if settings.platform == "cpu":
        values |= _CPU_DEFAULTS | cpu_defaults(engine_of(settings))
    return values


def engine_of(settings: RlSettings) -> str | None:
    """Return the rollout engine of the ``verl:`` section. Without one it is ours on a CPU, else ``None``."""
    named = {key.lstrip("+"): value for key, value in flatten(settings.verl)}.get(ENGINE)
    return named or (CPU_ENGINE if settings.platform == "cpu" else None)


_CPU_DEFAULTS: Flat = {
    "data.dataloader_num_workers": 0,
    "actor_rollout_ref.model.use_remove_padding": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.actor.fsdp_config.strategy": "fsdp2",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
    "actor_rollout_ref.ref.strategy": "fsdp2",
    "actor_rollout_ref.ref.use_torch_compile": False,
    "actor_rollout_ref.ref.fsdp_config.strategy": "fsdp2",
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
    "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": "fp32",
    "critic.strategy": "fsdp2",
    "critic.fsdp.strategy": "fsdp2",
    "critic.fsdp.use_torch_compile": False,
    ENGINE: CPU_ENGINE,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "+trainer.v1.sampler.sampler_kwargs.poll_interval_s": 0.1,
    "trainer.device": "cpu",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a nested mapping. A ``+`` before any part of a path moves to the front of the path.

    >>> dict(flatten({"a": {"+b": {"c": 1}}}))
    {'+a.b.c': 1}
    """
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, path)
        else:
            plus = "+" if "+" in path else ""
            yield plus + path.replace("+", ""), value


def overrides_of(settings: RlSettings, ray: Flat | None = None) -> Flat:
    """Return all verl overrides of a run: our defaults, then the ``verl:`` section, then the keys that our settings fix.

    Raises:
        ConfigError: The ``verl:`` section contradicts a key that our settings fix.
    """
    fixed = base_overrides(settings) | (ray or {})
    result = default_overrides(settings)
    by_key = {key.lstrip("+"): key for key in result}
    fixed_keys = {key.lstrip("+"): key for key in fixed}
    for key, value in flatten(settings.verl):
        name = key.lstrip("+")
        if name in fixed_keys and fixed[fixed_keys[name]] != value:
            instead = f"set {DERIVED[name]} instead" if name in DERIVED else "remove it from `verl:`"
            text = f"got {value!r}, but the other settings determine it ({fixed[fixed_keys[name]]!r})"
            raise ConfigError(f"verl.{name}: {text}; {instead}")
        result[by_key.get(name) or as_verl_takes(key)] = value
    if result.get("actor_rollout_ref.actor.strategy") != "fsdp2" and all(
        key != _SAVED for key, _ in flatten(settings.verl)
    ):
        # Only the shards of FSDP2 can be merged afterwards.
        result[_SAVED] = [*result[_SAVED], "hf_model"]
    if result.get(ENGINE) == "sglang":
        # SGLang needs its tokenizer to find stop strings, and verl turns the tokenizer off.
        result["actor_rollout_ref.rollout.skip_tokenizer_init"] = False
    if _several_processes(result):
        # verl's balancer knows one server per training worker. It is kept for one process: it honours rollout.full_determinism.
        result.setdefault(
            "actor_rollout_ref.rollout.router_config_path",
            str(Path(__file__).with_name("cpu_router.yaml")),
        )
    return result | fixed


def _several_processes(overrides: Flat) -> bool:
    """Return whether a training worker has more than one CPU server."""
    key = f"actor_rollout_ref.rollout.engine_kwargs.{CPU_ENGINE}.processes"
    values = {name.lstrip("+"): value for name, value in overrides.items()}
    processes = values.get(key, 1)
    chosen = values.get(ENGINE) == CPU_ENGINE
    return chosen and isinstance(processes, int) and processes > 1


def compose(overrides: Flat) -> Any:
    """Return verl's complete configuration (an OmegaConf) with ``overrides`` applied. Starts nothing.

    Raises:
        ConfigError: verl does not know a key, or does not accept a value.
        MissingExtraError: verl is not installed.
    """
    for key in overrides:
        if not key.startswith("+"):
            as_verl_takes(key)
    return _composed(overrides)


def _composed(overrides: Flat) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    with initialize_config_dir(config_dir=str(_config_folder()), version_base=None):
        try:
            return hydra_compose(config_name="ppo_trainer", overrides=arguments(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(f"verl rejects the configuration: {error}") from None


def arguments(overrides: Flat) -> list[str]:
    """Return ``key=value`` words for verl's command line, quoted for Hydra but not for a shell."""
    return [f"{key}={hydra_text(value)}" for key, value in overrides.items()]


def hydra_text(value: Any) -> str:
    """Write a value in Hydra's override grammar.

    >>> hydra_text([True, None, "a b", {"c": 1}])
    "[true,null,'a b',{c:1}]"
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(hydra_text(item) for item in value) + "]"
    text = str(value)
    if re.fullmatch(r"[A-Za-z_/][\w./-]*", text) and text.lower() not in _HYDRA_WORDS:
        return text
    # Inside quotes only a quote, and backslashes before one, need escaping.
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"


@cache
def _declared() -> Any:
    """Return verl's configuration without overrides."""
    return _composed({})


_HYDRA_WORDS = {"null", "true", "false", "nan", "inf"}


def _config_folder() -> Path:
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise MissingExtraError("verl", "rl")
    return Path(spec.origin).parent / "trainer" / "config"


_OF_ENGINES = [f"actor_rollout_ref.rollout.engine_kwargs.{engine}".split(".") for engine in GPU_RELEASES]
"""Sections that verl declares empty and whose keys are an engine's parameters."""
_STRICT = ("actor_rollout_ref", "critic")
"""Parts of verl's configuration whose sections become dataclasses. Others stay mappings, which users' losses read too."""


def as_verl_takes(key: str) -> str:
    """Return a key as Hydra expects it: with a ``+`` if verl's YAML omits it, but verl's dataclass or the engine has it.

    :func:`verl_ext.engines.parameter_findings` checks an engine's. A section accepts any key with a
    ``+``, unless verl turns the section into a dataclass. A dataclass accepts its fields
    only, so a worker process would fail at any other key.

    Raises:
        ConfigError: verl does not know the key.
    """
    name, added, omitted = key.lstrip("+"), key.startswith("+"), False
    level: Any = _declared()
    parts = name.split(".")
    for depth, part in enumerate(parts):
        known = _keys(level)
        if part in known:
            level = level._get_node(part)
            continue
        section = _dataclass_of(level)
        fields = typing.get_type_hints(section) if section else {}
        if part in fields:
            level, omitted = _without_none(fields[part]), True
        elif parts[:depth] in _OF_ENGINES or (
            (added or omitted) and (section is None or parts[0] not in _STRICT)
        ):
            return f"+{name}"
        else:
            where = ".".join(["verl", *parts[:depth]])
            options = suggestion(part, names) if (names := {*known, *fields}) else "it declares none"
            if elsewhere := _elsewhere(set(parts), parts[-1]):
                options = f"did you mean {' or '.join(elsewhere[:3])}?"
            if not section:
                options += (
                    f"; {where}.+{'.'.join(parts[depth:])}=VALUE adds a key that verl's YAML does not declare"
                )
            raise ConfigError(f"verl.{name}: {where} has no key {part!r}; {options}")
    return f"+{name}" if omitted else name


def _elsewhere(parts: set[str], last: str) -> list[str]:
    """Return the keys of verl that end in ``last`` and contain every part of a key that verl lacks."""
    from omegaconf import OmegaConf

    keys = (key for key, _ in flatten(typing.cast("Flat", OmegaConf.to_container(_declared()))))
    paths = [(key, key.split(".")) for key in keys]
    return [f"verl.{key}" for key, path in paths if path[-1] == last and parts <= set(path)]


def _keys(level: Any) -> list[str]:
    is_section = hasattr(level, "keys") and not isinstance(level, type)
    return list(level) if is_section else []


def _dataclass_of(level: Any) -> type | None:
    """Return the dataclass that verl makes of a section, ``None`` if it stays a mapping."""
    if isinstance(level, type):
        return level if is_dataclass(level) else None
    if "_target_" not in _keys(level):
        return None
    from hydra.utils import get_class

    section_class = get_class(level._target_)
    return section_class if is_dataclass(section_class) else None


def _without_none(hint: Any) -> Any:
    options = [option for option in typing.get_args(hint) if option is not NoneType]
    return options[0] if typing.get_origin(hint) is typing.Union and len(options) == 1 else hint
