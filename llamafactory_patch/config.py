"""Resolve a YAML file and overrides into the exact configuration for LLaMA-Factory."""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec, PromptMode, PromptSource
from afm.configuration import apply_overrides, override_key, read_extended
from afm.errors import ConfigError, MissingExtraError, UsageError, suggestion
from afm.presets import take_preset
from llamafactory_patch.conversations import TEMPLATE as AGENT_FLAN
from llamafactory_patch.settings import SftSettings, split_config


@dataclass(frozen=True, slots=True)
class SftJob:
    """The resolved configuration of a training run.

    Attributes:
        config: Keys of LLaMA-Factory and of this package, as the training process reads them.
        output_dir: Folder for the model and everything about its training.
        own: Keys of this package.
        agent: The agent to train, if the configuration names one.
        published: Values set by ``preset=script|paper``.
        file: The YAML.
    """

    config: dict[str, Any]
    output_dir: Path
    own: SftSettings = field(default_factory=SftSettings)
    agent: AgentSpec | None = None
    published: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None

    def dependencies(self) -> dict[str, Any]:
        """Return everything that influences the trained model, to compare two runs."""
        kept = {key: value for key, value in self.config.items() if key not in _WITHOUT_INFLUENCE}
        kept |= {"published": self.published} if self.published else {}
        prompt = PromptSource.load(self.own.prompt)
        asked = {} if prompt.mode is PromptMode.OWN else {"prompt": prompt.recorded}
        return kept | ({"agent": self.agent.digest} if self.agent else {}) | asked


_SECRETS = {
    "hf_hub_token": "set the environment variable HF_TOKEN",
    "hub_token": "set the environment variable HF_TOKEN",
    "ms_hub_token": "log in once with `modelscope login`",
    "om_hub_token": "log in once with openMind's own command",
    "swanlab_api_key": "set the environment variable SWANLAB_API_KEY",
    "swanlab_lark_secret": "start with `llamafactory-patch-cli train CONFIG`, which saves none",
    "swanlab_lark_webhook_url": "start with `llamafactory-patch-cli train CONFIG`, which saves none",
}
"""Keys that contain secrets, and what to do instead."""

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
"""Variables of AFM's training scripts, and the settings that replace them."""

_NAMES_ELSEWHERE = {
    "model": "write model_name_or_path=DIR",
    **dict.fromkeys(("batch_size", "train_batch_size"), "write per_device_train_batch_size=1"),
    **dict.fromkeys(("epochs", "total_epochs"), "write num_train_epochs=3"),
    **dict.fromkeys(("train_files", "train_file"), "write dataset_dir=DIR dataset=NAME"),
    **dict.fromkeys(("nproc_per_node", "n_gpus_per_node"), "set NPROC_PER_NODE=8 before the command"),
    "nnodes": "set NNODES, NODE_RANK and MASTER_ADDR before the command on each node (docs/sft.md)",
}
"""Names in ``afm rl``, verl and torchrun, and what to write instead."""

_CUTS_NO_ROW = {
    "max_length": "is LLaMA-Factory's limit of texts that it generates, and cuts no row",
    **dict.fromkeys(("max_seq_length", "max_seq_len", "model_max_length"), "is not read"),
}
"""Names of the longest row in other trainers."""

_WITHOUT_INFLUENCE = frozenset(
    {"disable_tqdm", "logging_steps", "output_dir", "overwrite_output_dir", "plot_loss", "report_to"}
    | {"resume_from_checkpoint", "save_steps", "save_strategy", "save_total_limit", "run_name"}
    | {"agent", "threads", "prompt", "prompt_check"}  # digests of the agent and of the prompt stand for these
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

    Paths of ``agent``, ``deepspeed`` and ``fsdp_config`` in the YAML are relative to the YAML; all others are relative
    to the working folder. ``fsdp_config`` without ``fsdp`` shards everything (``full_shard auto_wrap``).
    ``preset=script|paper`` first replaces settings of the recipe by published ones; see :mod:`afm.presets`.

    Raises:
        ConfigError: The file is missing or invalid YAML, a key is unknown, or settings contradict each other.
        UsageError: An override is wrong.
    """
    config = read_extended(Path(config_path), "training arguments", anchor=_anchor_paths)
    overrides, preset = take_preset(config, "sft", Path(config_path), overrides)
    apply_overrides(config, overrides)
    _check_keys(config, config_path, overrides)
    output_dir = config.get("output_dir")
    if not isinstance(output_dir, str) or not output_dir:
        got = "missing" if output_dir is None else f"got {output_dir!r}"
        raise ConfigError(f"{config_path}: output_dir: {got}, expected a folder; give output_dir=DIR")
    if config.get("resume_from_checkpoint") is None:
        config.pop("resume_from_checkpoint", None)  # stock configurations contain null for "not set"
    stock, own = split_config(config, str(config_path), overrides)
    if stock.get("fsdp_config"):
        stock.setdefault("fsdp", "full_shard auto_wrap")
    _check_contradictions(stock, config_path)
    config = {"stage": "sft", "do_train": True, **stock, **own.model_dump(mode="json", exclude_unset=True)}
    return SftJob(
        config, Path(output_dir), own, own.spec, preset.as_dict() if preset else {}, Path(config_path)
    )


def _check_contradictions(config: Mapping[str, Any], config_path: str | Path) -> None:
    if config.get("deepspeed") and config.get("fsdp"):
        raise ConfigError(
            f"{config_path}: deepspeed and fsdp are both set; disable one with deepspeed= or fsdp= fsdp_config="
        )
    kind = config.get("finetuning_type", "lora")
    for key, accepted in (("quantization_bit", ("lora", "oft")), ("adapter_name_or_path", ("lora",))):
        if config.get(key) is not None and kind not in accepted:
            raise ConfigError(
                f"{config_path}: {key}: LLaMA-Factory takes it only with an adapter, got finetuning_type={kind}; "
                f"write finetuning_type=lora, or remove {key}"
            )
    for key in _SECRETS:
        if config.get(key):
            raise ConfigError(
                f"{config_path}: {key}: the secret would be saved with the configuration; remove the key and "
                f"{_SECRETS[key]}"
            )


def _anchor_paths(config: dict[str, Any], folder: Path) -> None:
    for key, suffix in (("agent", ".yaml"), ("deepspeed", ".json"), ("fsdp_config", ".json")):
        value = config.get(key)
        if isinstance(value, str) and value.endswith(suffix):
            config[key] = os.path.normpath(folder / value)


def _check_keys(config: Mapping[str, Any], config_path: str | Path, overrides: Sequence[str]) -> None:
    """Refuse unknown keys and values of the wrong type before LLaMA-Factory starts, which takes a minute."""
    known = engine_keys()
    typed = {override_key(override).split(".")[0]: override for override in overrides}
    for key, value in config.items():
        if key in SftSettings.model_fields:
            continue
        kind = known.get(key)
        if key in _SCRIPT_VARIABLES and key not in known:
            fault = f"{key} belongs to AFM's scripts; here: {_SCRIPT_VARIABLES[key]}"
        elif key == "template" and isinstance(value, str) and value not in template_names():
            fault = f"template: got {value!r}, expected a template of LLaMA-Factory; {suggestion(value, template_names())}"
        elif key in _CUTS_NO_ROW and not config.get("predict_with_generate"):
            fault = f"{key}: {_CUTS_NO_ROW[key]}; write cutoff_len={value}"
        elif key not in known:
            close = suggestion(key, [*known, *SftSettings.model_fields])
            hint = close if close.startswith("did you mean") else "see LLaMA-Factory's training arguments"
            hint = _NAMES_ELSEWHERE.get(key, hint)
            fault = f"unknown key {key!r}; {hint}"
        elif kind is not None and not kind.holds(value):
            fault = f"{key}: got {value!r}, expected {kind.words}"
        else:
            continue
        if key in typed:
            raise UsageError(f"override {typed[key]!r}: {fault}")
        raise ConfigError(f"{config_path}: {fault}")


def fsdp_settings(job: SftJob) -> dict[str, Any]:
    """Return the mapping of ``fsdp_config``, which may be a file; empty without it.

    Raises:
        ConfigError: The file is missing or not JSON.
    """
    settings = job.config.get("fsdp_config") or {}
    if isinstance(settings, dict):
        return settings
    try:
        return dict(json.loads(Path(settings).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"fsdp_config: {settings} cannot be read as JSON: {error}") from None


_HPARAMS = ("model_args", "data_args", "training_args", "finetuning_args", "generating_args")
_SOURCES = {
    "llamafactory": tuple(f"hparams/{name}.py" for name in _HPARAMS),
    "transformers": ("training_args.py", "training_args_seq2seq.py"),
}


_POSITIVE = frozenset(
    {"cutoff_len", "gradient_accumulation_steps", "lora_rank", "max_samples", "num_train_epochs"}
    | {"per_device_eval_batch_size", "per_device_train_batch_size", "preprocessing_batch_size"}
    | {"preprocessing_num_workers"}
)
_NOT_NEGATIVE = frozenset({"dataloader_num_workers", "learning_rate", "val_size", "weight_decay"})
"""Numbers whose invalid values the trainer reports late, or silently misinterprets."""

_OPEN = frozenset({"swanlab_mode"})
"""Texts with more choices than LLaMA-Factory's annotation lists; see ``checks.py``."""

_TYPES: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "bool": ("true or false", (bool,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "str": ("a text", (str,)),
    "list": ("a list", (list,)),
    "dict": ("a mapping", (dict,)),
    "None": ("nothing", (type(None),)),
}
"""Types in annotations, their names in messages, and the Python types of their YAML values."""


@dataclass(frozen=True, slots=True)
class KeyKind:
    """What values a key accepts. Errors show ``words``. ``choices`` are the only texts, and booleans are not numbers."""

    words: str
    types: tuple[type, ...]
    choices: tuple[str, ...] = ()
    above: float = -math.inf
    least: float = -math.inf

    def holds(self, value: object) -> bool:
        """Return whether LLaMA-Factory accepts ``value``; it does not accept NaN and infinity."""
        if isinstance(value, bool):
            return bool in self.types
        if not isinstance(value, self.types):
            return False
        if isinstance(value, (int, float)):
            return math.isfinite(value) and value > self.above and value >= self.least
        return not (isinstance(value, str) and self.choices) or value in self.choices


@cache
def template_names() -> tuple[str, ...]:
    """Return the chat templates of LLaMA-Factory, read from its source text, and the one of this package.

    Raises:
        MissingExtraError: LLaMA-Factory is not installed.
    """
    [source] = _engine_files({"llamafactory": ("data/template.py",)})
    return (AGENT_FLAN, *re.findall(r'^    name="([^"]+)",$', source.read_text("utf-8"), re.MULTILINE))


@cache
def engine_keys() -> Mapping[str, KeyKind | None]:
    """Return the keys of LLaMA-Factory, each with its kind if that is a simple one.

    Reads the source text of the argument classes, because importing LLaMA-Factory takes seconds.

    Raises:
        MissingExtraError: LLaMA-Factory or transformers is not installed.
    """
    files = _engine_files(_SOURCES)
    return dict(field for file in files for field in _fields(ast.parse(file.read_text("utf-8"))))


def _engine_files(sources: Mapping[str, Sequence[str]]) -> list[Path]:
    """Return files of packages without importing the packages."""
    files = []
    for package, names in sources.items():
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise MissingExtraError(package, "sft")
        files += [Path(spec.submodule_search_locations[0]) / name for name in names]
    return files


def _fields(tree: ast.Module) -> Iterator[tuple[str, KeyKind | None]]:
    listed = _also_listed(tree)
    for class_def in tree.body:
        if not isinstance(class_def, ast.ClassDef) or not _is_dataclass(class_def):
            continue
        for statement in class_def.body:
            if not isinstance(statement, ast.AnnAssign) or _is_hidden(statement.value):
                continue
            if isinstance(statement.target, ast.Name):
                name = statement.target.id
                yield name, _kind(name, statement.annotation, listed=name in listed)


def _also_listed(tree: ast.Module) -> frozenset[str]:
    """Return keys annotated as text whose class splits them at commas, so that a list works as well."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    arguments = (call.args[0] for call in calls if ast.unparse(call.func) == "split_arg")
    return frozenset(key.attr for key in arguments if isinstance(key, ast.Attribute))


def _kind(name: str, annotation: ast.expr, *, listed: bool) -> KeyKind | None:
    """Return what an annotation allows; ``None`` if it includes a type that YAML has no values for."""
    parts = list(_union(annotation))
    choices = tuple(
        value.value
        for part in parts
        if _head(part) == "Literal" and name not in _OPEN
        for value in ast.walk(part)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    )
    heads = ["str" if _head(part) == "Literal" else _head(part) for part in parts]
    if any(head not in _TYPES for head in heads):
        return None
    heads = list(dict.fromkeys([*heads, "list"] if listed else heads))
    words = [_TYPES[head][0] for head in heads if head != "None"]
    if choices:
        words = [f"one of {', '.join(choices)}"]
    if name in _POSITIVE | _NOT_NEGATIVE:
        words = [f"{word} {'above 0' if name in _POSITIVE else 'of at least 0'}" for word in words]
    return KeyKind(
        " or ".join(words),
        tuple(kind for head in heads for kind in _TYPES[head][1]),
        choices,
        above=0 if name in _POSITIVE else -math.inf,
        least=0 if name in _NOT_NEGATIVE else -math.inf,
    )


def _union(annotation: ast.expr) -> Iterator[ast.expr]:
    if isinstance(annotation, ast.BinOp):
        yield from _union(annotation.left)
        yield from _union(annotation.right)
    elif isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Optional":
        yield from (annotation.slice, ast.Constant(None))
    else:
        yield annotation


def _head(annotation: ast.expr) -> str:
    return ast.unparse(annotation.value if isinstance(annotation, ast.Subscript) else annotation)


def _is_dataclass(class_def: ast.ClassDef) -> bool:
    names = {ast.unparse(decorator).split("(")[0] for decorator in class_def.decorator_list}
    return "dataclass" in names


def _is_hidden(value: ast.expr | None) -> bool:
    """Return whether a field is ``field(init=False, ...)``, which no configuration can set."""
    return isinstance(value, ast.Call) and any(
        keyword.arg == "init" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        for keyword in value.keywords
    )
