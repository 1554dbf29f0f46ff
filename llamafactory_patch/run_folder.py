"""The output folder of a training run: its files, its progress, and the last steps of a finished run."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from afm.agents import save_agent
from afm.errors import ConfigError
from afm.findings import package_version
from afm.presets import preset_lines
from afm.runs.atomic import replace_text
from afm.runs.folder import changes
from llamafactory_patch.checks import tracker_settings
from llamafactory_patch.config import SftJob

CONFIG_FILE = "sft_config.yaml"
MANIFEST_FILE = "sft_manifest.json"
HISTORY_FILE = "trainer_log.jsonl"
TOKENISED_FOLDER = "tokenized"
"""Folder of the tokenised rows; deleted when the run is finished."""

_LAST_BYTES = 4096
_VERSIONS = ("afm", "llamafactory", "torch", "transformers", "datasets", "accelerate")


def config_path(job: SftJob, node: int = 0) -> Path:
    """Return the configuration file for LLaMA-Factory; each further node has its own file."""
    return job.output_dir / (f"sft_config.node{node}.yaml" if node else CONFIG_FILE)


def config_text(job: SftJob, config: dict[str, Any]) -> str:
    """Return ``config`` as YAML; comments show the settings that LLaMA-Factory does not get."""
    agent = f"{job.agent.name} (digest {job.agent.digest})" if job.agent else "none"
    head = f"# Resolved by `afm sft`. agent: {agent}; threads: {job.own.threads or 'all'}\n"
    head += "".join(f"# {line}\n" for line in preset_lines(job.published))
    return head + yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def is_finished(job: SftJob) -> bool:
    """Return whether this run has already finished successfully.

    Raises:
        ConfigError: Another training has begun or finished in the same folder.
    """
    manifest = job.output_dir / MANIFEST_FILE
    if not manifest.is_file() or job.config.get("overwrite_output_dir"):
        return False
    try:
        data = json.loads(manifest.read_text(encoding="utf-8"))
        finished, settings = bool(data["finished"]), dict(data["settings"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{manifest} is damaged; delete it to continue the run in this folder without a check of its settings"
        ) from None
    # A training that was refused, or failed before its first checkpoint and log line, does not claim the folder.
    begun = finished or _last_checkpoint(job.output_dir) or logged_losses(job.output_dir / HISTORY_FILE)
    if begun and (differences := changes(settings, json.loads(json.dumps(job.dependencies())))):
        raise ConfigError(
            f"{job.output_dir} has {'a finished' if finished else 'an interrupted'} training with other "
            f"settings ({'; '.join(differences)}); choose another output_dir, or start over there with "
            "overwrite_output_dir=true"
        )
    return finished


def prepare(job: SftJob, *, node: int = 0, progress_bar: bool) -> str:
    """Write the configuration so that the run begins, or continues where it was interrupted.

    Args:
        node: Number of this node. The first node also cleans up the folder. All nodes must find the same checkpoint, so
            ``output_dir`` must be on a shared file system.

    Returns:
        Notes for the user, or an empty text.
    """
    config = {"disable_tqdm": not progress_bar, **tracker_settings(job), **job.config}
    first_node = node == 0
    begun = config_path(job, node).is_file()
    notes = []
    anew = bool(config.get("overwrite_output_dir"))
    if first_node and "resume_from_checkpoint" not in config:
        notes += _set_aside(job.output_dir, everything=anew)
    if "resume_from_checkpoint" not in config and not anew:
        checkpoint = _last_checkpoint(job.output_dir)
        if checkpoint is not None:
            config["resume_from_checkpoint"] = str(checkpoint)
            notes.append(f"continuing from {checkpoint}")
            if first_node:
                _cut_history(job.output_dir / HISTORY_FILE, _step(checkpoint))
        elif begun:
            config["overwrite_output_dir"] = True
            notes.append("it was interrupted before its first checkpoint, and starts from the beginning")
    if first_node:
        _write_manifest(job, finished=None)
    replace_text(config_path(job, node), config_text(job, config))
    return "\n".join(notes)


def finish(job: SftJob, *, seconds: float) -> None:
    """Complete the trained model, delete the tokenised rows, and mark the run as finished.

    Rows in a configured ``tokenized_path`` are kept.
    """
    if job.agent is not None:
        save_agent(job.agent, job.output_dir / "agent.yaml")
    _allow_cache(job.output_dir / "config.json")
    _mend_train_loss(job)
    if not job.config.get("tokenized_path"):
        shutil.rmtree(job.output_dir / TOKENISED_FOLDER, ignore_errors=True)
    versions = {name: package_version(name) for name in _VERSIONS}
    replace_text(job.output_dir / "README.md", _card(job, versions))
    _write_manifest(
        job,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds_since_last_start=round(seconds, 1),
        versions=versions,
    )


def _card(job: SftJob, versions: dict[str, str | None]) -> str:
    """Return the model card. The trainer's own has a dead link to a base model in a folder, and nothing of the agent."""
    base = str(job.config.get("model_name_or_path"))
    adapter = (job.output_dir / "adapter_config.json").is_file()
    head = ["library_name: peft" if adapter else "library_name: transformers"]
    head += [] if Path(base).exists() else [f"base_model: {json.dumps(base)}"]
    losses = [*logged_losses(job.output_dir / HISTORY_FILE).items()]
    facts = {
        "base model": base,
        "trained": "an adapter" if adapter else job.config.get("finetuning_type", "lora"),
        "agent": job.agent.name if job.agent else "none",
        "data": f"{job.config.get('dataset')} of {job.config.get('dataset_dir', 'data')}",
        "steps": f"{losses[-1][0]:,}" if losses else "not logged",
        "loss": ", ".join(f"{loss:.4g} at step {step:,}" for step, loss in (losses[:1] + losses[1:][-1:])),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "command": f"`afm sft {job.file or 'CONFIG'}`, with the settings in {CONFIG_FILE}",
    }
    rows = [f"| {name} | {value} |" for name, value in facts.items() if value]
    lines = ["---", *head, "---", "", f"# {job.output_dir.resolve().name}", ""]
    lines += ["Fine-tuned with LLaMA-Factory.", "", "| fact | value |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _mend_train_loss(job: SftJob) -> None:
    """Write the mean loss of all steps; after a resume, the trainer divides only the later losses by all steps."""
    file = config_path(job)
    config = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    losses = logged_losses(job.output_dir / HISTORY_FILE)
    if not losses or not config.get("resume_from_checkpoint"):
        return
    steps = [0, *losses]
    mean = sum(
        loss * (step - before) for before, (step, loss) in zip(steps, losses.items(), strict=False)
    ) / max(losses)
    for name in ("train_results.json", "all_results.json"):
        file = job.output_dir / name
        if file.is_file():
            results = json.loads(file.read_text(encoding="utf-8"))
            replace_text(file, json.dumps(results | {"train_loss": mean}, indent=4) + "\n")


def logged_losses(history: Path) -> dict[int, float]:
    """Return the logged loss by step, each the mean since the line before."""
    return {row["current_steps"]: float(row["loss"]) for row in _logged(history) if "loss" in row}


def last_logged(history: Path) -> dict[str, Any] | None:
    """Return the last line of the trainer's log, which may be growing, or ``None``."""
    return next(iter(reversed(_logged(history, _LAST_BYTES))), None)


def _logged(history: Path, last_bytes: int = 0) -> list[dict[str, Any]]:
    """Read the lines of the trainer's log, all or the last ones; skip damaged lines."""
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    with suppress(FileNotFoundError), history.open("rb") as file:  # a trainer that begins anew deletes it
        file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes) if last_bytes else 0)
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            rows.append(row | {"current_steps": int(row["current_steps"])})
    return rows


def _write_manifest(job: SftJob, **progress: Any) -> None:
    manifest = {"settings": job.dependencies(), "agent": job.agent.name if job.agent else None, **progress}
    replace_text(job.output_dir / MANIFEST_FILE, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def _allow_cache(config_file: Path) -> None:
    """Set ``use_cache: true``. LLaMA-Factory saves false, which is for training and makes generation very slow."""
    if not config_file.is_file():
        return
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if config.get("use_cache") is False:
        replace_text(
            config_file, json.dumps({**config, "use_cache": True}, indent=2, ensure_ascii=False) + "\n"
        )


def _checkpoints(output_dir: Path) -> list[Path]:
    checkpoints = (
        path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)
    )
    return sorted(checkpoints, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint has its last file, ``trainer_state.json`` (transformers 5.5.4, ``_save_checkpoint``)."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and state.get("global_step") == _step(checkpoint)


def _last_checkpoint(output_dir: Path) -> Path | None:
    complete = [path for path in _checkpoints(output_dir) if _is_complete(path)]
    return complete[-1] if complete else None


def _set_aside(output_dir: Path, *, everything: bool) -> list[str]:
    """Rename checkpoints that this run must not continue from.

    Incomplete checkpoints of a killed run would break the trainer. With ``everything``, also rename those of a
    replaced run, because the new run would otherwise resume from them after an interruption.
    """
    notes = []
    for checkpoint in _checkpoints(output_dir):
        complete = _is_complete(checkpoint)
        if everything or not complete:
            aside = checkpoint.with_name(f"{'replaced' if complete else 'incomplete'}-{checkpoint.name}")
            shutil.rmtree(aside, ignore_errors=True)
            checkpoint.rename(aside)
            reason = "belongs to an earlier training" if complete else "was not saved completely"
            notes.append(f"{checkpoint} {reason}; renamed to {aside.name}")
    return notes


def _cut_history(history: Path, last_step: int) -> None:
    """Drop the lines of steps that will be repeated, and an incomplete last line."""
    if history.is_file():
        kept = [row for row in _logged(history) if row["current_steps"] <= last_step]
        replace_text(history, "".join(json.dumps(row) + "\n" for row in kept))
