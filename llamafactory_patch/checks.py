"""Checks before a training run starts: its model, data, output folder and experiment trackers.

Trackers write into the folder of the model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from afm.agents import AgentSpec
from afm.errors import ConfigError, MissingExtraError, exists_next_to, json_word, suggestion
from afm.findings import absent, fetch_advice
from afm.runs.folder import manifest_of, sha256_of
from llamafactory_patch.config import SftJob
from llamafactory_patch.settings import names_in

_INDEX_FILE = "dataset_info.json"
_ASKED = "{question}"
_SOURCES = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"}
"""Keys of an entry of ``dataset_info.json`` that name the source of the rows."""

SWANLAB_BOARD = "swanboard==0.1.10b2"
"""Package that SwanLab 0.10.3 needs in mode ``local``; without it, SwanLab logs an error and stores nothing."""

_SWANLAB_MODES = ("cloud", "local", "offline", "disabled")


def check_trackers(job: SftJob, env: Mapping[str, str]) -> None:
    """Check that the configured trackers are installed and can log in.

    Raises:
        ConfigError: A key is missing, or a setting is invalid.
        MissingExtraError: A package is not installed.
    """
    wanted = _report_to(job.config)
    if "swanlab" in wanted:
        raise ConfigError(
            "report_to: got swanlab; set use_swanlab=true instead (with swanlab_mode, swanlab_project)"
        )
    if "tensorboard" in wanted:
        _require("tensorboard")
    if "wandb" in wanted:
        _check_wandb(env)
    if job.config.get("use_swanlab"):
        _check_swanlab(str(job.config.get("swanlab_mode") or "cloud"), env)


def tracker_settings(job: SftJob) -> dict[str, Any]:
    """Return settings for LLaMA-Factory with which SwanLab writes into the output folder."""
    return {"swanlab_logdir": str(job.output_dir / "swanlab")} if job.config.get("use_swanlab") else {}


def tracker_variables(job: SftJob) -> dict[str, str]:
    """Return environment variables with which TensorBoard and W&B write into the output folder."""
    wanted = _report_to(job.config)
    variables = {}
    if "tensorboard" in wanted:
        variables["TENSORBOARD_LOGGING_DIR"] = str(job.output_dir / "tensorboard")
    if "wandb" in wanted:
        variables["WANDB_DIR"] = str(job.output_dir.resolve())
    return variables


def _report_to(config: Mapping[str, Any]) -> set[str]:
    value = config.get("report_to") or []
    return {value} if isinstance(value, str) else {str(name) for name in value}


def _check_wandb(env: Mapping[str, str]) -> None:
    _require("wandb")
    if env.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or env.get("WANDB_API_KEY"):
        return
    netrc = Path(env.get("NETRC") or Path.home() / ".netrc")
    if not netrc.is_file() or "wandb.ai" not in netrc.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            "report_to: wandb has no key: set WANDB_API_KEY, or WANDB_MODE=offline (then `wandb sync` later)"
        )


def _check_swanlab(mode: str, env: Mapping[str, str]) -> None:
    _require("swanlab")
    if mode not in _SWANLAB_MODES:
        raise ConfigError(f"swanlab_mode: got {mode!r}, expected one of {', '.join(_SWANLAB_MODES)}")
    if mode == "local" and find_spec("swanboard") is None:
        raise ConfigError(
            f"swanlab_mode: local needs one more package: pip install --no-deps {SWANLAB_BOARD} 'peewee<4' ujson"
        )
    places = (Path(env.get("SWANLAB_ROOT") or Path.home() / ".swanlab"), Path(".swanlab"))
    if (
        mode == "cloud"
        and not env.get("SWANLAB_API_KEY")
        and not any((p / ".netrc").is_file() for p in places)
    ):
        raise ConfigError(
            "swanlab_mode: cloud has no key: set SWANLAB_API_KEY, or swanlab_mode=offline (then `swanlab sync` "
            "later), or swanlab_mode=local"
        )


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise MissingExtraError(package, "trackers")


def check_sources(job: SftJob) -> None:
    """Check early that the model and the data sets exist and that the output folder can be created.

    Raises:
        ConfigError: The model or a data set does not exist, or ``output_dir`` cannot be created.
    """
    check_output(job)
    check_model(job)
    check_data(job)


def check_output(job: SftJob) -> None:
    """Check that ``output_dir`` is a folder or can be created.

    Raises:
        ConfigError: It, or one of its parents, is a file.
    """
    for place in (job.output_dir, *job.output_dir.parents):
        if place.exists() and not place.is_dir():
            raise ConfigError(f"output_dir: {place} is a file, expected a folder; choose another output_dir")


def _starter_advice(model: str, recipe: Path | None) -> str:
    """Return the command of the starter of ``afm init`` that makes its first model; empty for other recipes."""
    program = recipe.with_name("start_model.py") if recipe is not None else None
    made = program is not None and Path(model) == Path("runs/start") and program.is_file()
    return "; python start_model.py makes it (README.md)" if made else ""


def check_model(job: SftJob) -> None:
    """Check that the model is a folder with the modules of ``lora_target``, or has the form of a name on a hub.

    Raises:
        ConfigError: It is neither, or no module has such a name.
    """
    model = str(job.config.get("model_name_or_path", ""))
    # `runs/` and `models/` are where this project's commands write models.
    hub_name = re.fullmatch(r"(?!runs/|models/)\w[\w.-]*/[\w.-]+", model)
    if not model or (not hub_name and not Path(model).expanduser().is_dir()):
        raise ConfigError(
            f"model_name_or_path: {model!r} is not a folder; expected a folder, or ORGANISATION/NAME on the hub "
            f"(`afm import` turns a GGUF file into a folder){exists_next_to(model, job.file) if model else ''}"
            f"{fetch_advice(model, 'model_name_or_path')}{_starter_advice(model, job.file)}"
        )
    _check_targets(job.config, Path(model).expanduser())


def _check_targets(config: Mapping[str, Any], model: Path) -> None:
    """Refuse a ``lora_target`` that no module has. peft finds it only when the model is loaded."""
    targets = names_in(config.get("lora_target"))
    adapters = config.get("finetuning_type", "lora") == "lora" and not config.get("adapter_name_or_path")
    if not adapters or not targets or targets == ["all"]:
        return
    modules = _modules(model)
    if modules and not any(f".{name}".endswith(f".{target}") for name in modules for target in targets):
        known = sorted({name.rpartition(".")[2] for name in modules if re.search(r"\.\d+\.", name)})
        got = ", ".join(targets)
        raise ConfigError(
            f"lora_target: no module of {model} is named {got}; set lora_target=all, or some of {','.join(known)}"
        )


def _modules(model: Path) -> set[str]:
    """Return the modules with matrices in a model's safetensors files, empty if one of them cannot be read."""
    modules = set()
    for file in model.glob("*.safetensors"):
        try:
            with file.open("rb") as weights:
                header = json.loads(weights.read(int.from_bytes(weights.read(8), "little")))
            matrices = [name for name, entry in header.items() if len(entry.get("shape", ())) > 1]
        except (OSError, OverflowError, MemoryError, ValueError, AttributeError):
            return set()
        modules |= {name.rpartition(".")[0] for name in matrices}
    return modules | {"lm_head"} if modules else modules  # it may share the matrix of the embedding


def check_data(job: SftJob) -> None:
    """Check that ``dataset_info.json`` lists the data sets and that local ones exist.

    Raises:
        ConfigError: A data set is missing, of another agent or of other roles, or LLaMA-Factory cannot read the entry.
    """
    folder = job.config.get("dataset_dir", "data")
    names = [name for key in ("dataset", "eval_dataset") for name in names_in(job.config.get(key))]
    if not names or not isinstance(folder, str) or folder == "ONLINE" or folder.startswith("REMOTE:"):
        return
    index = Path(folder, _INDEX_FILE)
    known = _index(index, job.file)
    for name in names:
        if name not in known:
            raise ConfigError(f"dataset: {index} has no {name!r}; {suggestion(name, known)}")
        entry = known[name]
        if not isinstance(entry, dict) or not _SOURCES & entry.keys():
            raise ConfigError(
                f"{index}: {name}: got {str(entry)[:80]!r}, expected an object with one of "
                f"{', '.join(sorted(_SOURCES))}"
            )
        for part in ("columns", "tags"):
            if not isinstance(entry.get(part, {}), dict):
                raise ConfigError(f"{index}: {name}.{part}: got {entry[part]!r}, expected an object of names")
        if _SOURCES & entry.keys() == {"file_name"} and not Path(folder, str(entry["file_name"])).exists():
            raise ConfigError(f"{Path(folder, str(entry['file_name']))} is missing, but {index} lists it")
    for stale in stale_data(job):
        if stale.tags:
            raise ConfigError(f"dataset: {stale}")


@dataclass(frozen=True, slots=True)
class StaleData:
    """A data set that was prepared with the same agent before its declaration changed.

    Attributes:
        tags: The keys that differ and decide which text is what.
        prompt: The keys that differ and change only the prompt.
        command: How to prepare the data set again.
    """

    file: Path
    agent: str
    tags: tuple[str, ...]
    prompt: tuple[str, ...]
    command: str

    def __str__(self) -> str:
        keys = ", ".join(self.tags or self.prompt)
        rows = "" if self.tags else "; prompt=own puts the new prompt into the rows"
        return (
            f"{self.file} was prepared with another declaration of agent {self.agent!r}, which differs in {keys}{rows}. "
            f"To prepare it again: {self.command}"
        )


def stale_data(job: SftJob) -> Iterator[StaleData]:
    """Yield the data sets whose manifest holds another declaration of the agent.

    Raises:
        ConfigError: All data sets are of another agent.
    """
    folder = job.config.get("dataset_dir", "data")
    names = names_in(job.config.get("dataset"))
    if job.agent is None or not isinstance(folder, str) or not Path(folder, _INDEX_FILE).is_file():
        return
    known = _index(Path(folder, _INDEX_FILE))
    files = [Path(folder, str(known.get(name, {}).get("file_name", ""))) for name in names]
    _check_agent(job, files)
    for name, file in zip(names, files, strict=True):
        noted = _manifest(file)
        try:
            before = AgentSpec.model_validate(noted["declaration"])
        except (KeyError, ValueError):
            continue
        if before.name != job.agent.name or not _made(file, noted):
            continue
        tags, prompt = _changes(before, job.agent)
        if tags or prompt:
            sources = [os.path.normpath(Path(folder, path)) for path in noted.get("sources", ())]
            words = [
                "afm data prepare sft",
                *(sources or noted.get("inputs", ())),
                "--agent",
                job.config["agent"],
                "--name",
                name,
            ]
            command = " ".join([words[0], *map(quote, map(str, [*words[1:], "--output-dir", folder]))])
            yield StaleData(file, before.name, tags, prompt, command)


def _changes(before: AgentSpec, now: AgentSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the keys that differ: those that decide which text is what, and those that change only the prompt."""
    parts = [{tag: (role.kind, role.tool) for tag, role in spec.roles.items()} for spec in (before, now)]
    tags = [f"roles.{tag}" for tag in {**parts[0], **parts[1]} if parts[0].get(tag) != parts[1].get(tag)]
    tags += [
        key for key in ("answer_format", "answer_separator") if getattr(before, key) != getattr(now, key)
    ]
    if before.user_message(_ASKED) == now.user_message(_ASKED):
        return tuple(tags), ()
    prompt = [f"roles.{tag}" for tag, role in now.roles.items() if role != before.roles.get(tag, role)]
    keys = ("prompt", "question_format", "rules", "transitions")
    return tuple(tags), (*prompt, *(key for key in keys if getattr(before, key) != getattr(now, key)))


def _manifest(file: Path) -> dict[str, Any]:
    return manifest_of(file.parent / f"{file.stem}.manifest.json")


def _made(file: Path, noted: Mapping[str, Any]) -> bool:
    outputs = noted.get("outputs") or {}
    return file.name in outputs and outputs[file.name] == sha256_of(file)


def _check_agent(job: SftJob, files: Sequence[Path]) -> None:
    """Refuse files that were all made of trajectories of other agents; some may be, as code and math share their masks."""
    if job.agent is None or not files:
        return
    manifests = [_manifest(file) for file in files]
    names = [(noted.get("agent") or {}).get("name") for noted in manifests]
    if any(name in (None, job.agent.name) for name in names):
        return
    if _made(files[0], manifests[0]):
        raise ConfigError(
            f"dataset: {files[0]} belongs to agent {names[0]!r}, expected {job.agent.name!r}; give agent={names[0]} "
            "(for your own agent, its YAML), or make a data set for this agent: afm data prepare sft TRAJECTORIES.jsonl "
            f"--agent {job.config['agent']} --output-dir DIR"
        )


def _index(index: Path, config: Path | None = None) -> dict[str, Any]:
    if not index.is_file():
        text, advice = absent(index, config)
        advice = advice or "; `afm data prepare sft` writes it next to the data"
        raise ConfigError(f"dataset_dir: {index}: {text}{advice}")
    try:
        known = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{index} cannot be read as JSON: {error}") from None
    if not isinstance(known, dict):
        raise ConfigError(f"{index}: got {json_word(known)}, expected an object of data sets by name")
    return known
