"""``afm doctor``: what is installed, and what would fail, before anything costs time."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from afm.configuration import override_key, read_extended
from afm.errors import ConfigError
from afm.planning import Finding, failed, hardware_from

SFT_DOCTOR = "llamafactory_patch.doctor"
RL_DOCTOR = "verl_ext.doctor"
_SFT_KEYS = frozenset({"model_name_or_path", "dataset", "stage", "finetuning_type", "template", "cutoff_len"})
_RL_KEYS = frozenset({"train_files", "verl", "platform", "rewards", "limits"})
"""By which a configuration is told apart."""

_PACKAGES = {
    "sft": ("llamafactory", "torch", "transformers", "deepspeed"),
    "rl": ("verl", "ray", "TransferQueue"),
    "rewards": ("math-verify",),
    "servers": ("fastapi", "uvicorn", "trafilatura"),
    "trackers": ("tensorboard", "wandb", "swanlab"),
}


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML of a training to check, for example configs/sft/web_agent_qwen2.5_7b.yaml or configs/rl/web_dapo_7b.yaml."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, as for `afm sft` and `afm rl`.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Nodes it is meant for [default: verl.trainer.nnodes; for afm sft NNODES, else the recipe's header].",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of each node [default: NPROC_PER_NODE, else the header].")
    ] = None,
    gpu_gib: Annotated[
        float | None, typer.Option(min=1, help="Memory of one GPU in GiB [default: the header, else 80].")
    ] = None,
) -> None:
    """Check this computer, or a training: arguments, every row, trackers, lengths, steps, disk, memory of each GPU.

    For reinforcement learning also batches, tools and their servers, the judge and its cost, the cache of the rollout
    engines, GPU hours. The exit status is 1 if anything would fail.
    """
    if config is None:
        for line in _environment():
            print(line)
        return
    findings = _diagnosed(config, overrides or [], nodes, gpus, gpu_gib)
    for finding in findings:
        print(finding)
    if failed(findings):
        raise typer.Exit(1)


def _diagnosed(
    config: Path, overrides: list[str], nodes: int | None, gpus: int | None, gpu_gib: float | None
) -> list[Finding]:
    findings: list[Finding]
    if _is_reinforcement(config, overrides):
        checks = importlib.import_module(RL_DOCTOR)
        asked = checks.AskedHardware(nodes, gpus, gpu_gib)
        findings = checks.diagnose(config, overrides, asked, os.environ)
    else:
        checks = importlib.import_module(SFT_DOCTOR)
        hardware = hardware_from(os.environ, config, nodes, gpus, gpu_gib)
        findings = checks.diagnose(config, overrides, hardware, os.environ)
    return findings


def _is_reinforcement(config: Path, overrides: list[str]) -> bool:
    """Whether a configuration is one of `afm rl`, by its keys.

    Raises:
        ConfigError: It is one of neither engine, or of both.
    """
    keys = set(read_extended(config, "a training")) | {
        override_key(override).partition(".")[0] for override in overrides
    }
    rl, sft = sorted(keys & _RL_KEYS), sorted(keys & _SFT_KEYS)
    if bool(rl) == bool(sft):
        found = f"both {rl[0]!r} and {sft[0]!r}" if rl else f"none of either; it has {sorted(keys)}"
        raise ConfigError(
            f"{config}: expected keys of `afm rl` ({', '.join(sorted(_RL_KEYS))}) or of `afm sft` "
            f"({', '.join(sorted(_SFT_KEYS))}), found {found}"
        )
    return bool(rl)


def _environment() -> list[str]:
    free = shutil.disk_usage(Path.cwd()).free / 1024**3
    lines = [f"Python {platform.python_version()}, {os.cpu_count()} CPU cores, {free:.0f} GiB free here"]
    for extra, packages in _PACKAGES.items():
        found = ", ".join(f"{name} {_version(name)}" for name in packages)
        lines.append(f"{extra:<9} {found}")
    lines.append(f"sandbox   bubblewrap: {shutil.which('bwrap') or 'absent'}")
    lines.append(f"GPUs      nvidia-smi: {shutil.which('nvidia-smi') or 'absent'}")
    return lines


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
