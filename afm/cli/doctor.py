"""``afm doctor``: what is installed, and what would fail, before anything costs time."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

DOCTOR = "llamafactory_patch.doctor"
HARDWARE = "llamafactory_patch.hardware"

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
            help="YAML of a fine-tuning to check, for example configs/sft/web_agent_qwen2.5_7b.yaml."
        ),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, as for `afm sft`.")] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Nodes it is meant for [default: NNODES, else the recipe's header]."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of each node [default: NPROC_PER_NODE, else the header].")
    ] = None,
    gpu_gib: Annotated[
        float | None, typer.Option(min=1, help="Memory of one GPU in GiB [default: the header, else 80].")
    ] = None,
) -> None:
    """Check this computer, or a fine-tuning: arguments, every row, trackers, lengths, steps, disk, memory of each GPU.

    The exit status is 1 if anything would fail.
    """
    if config is None:
        for line in _environment():
            print(line)
        return
    checks = importlib.import_module(DOCTOR)
    hardware = importlib.import_module(HARDWARE).hardware_from(os.environ, config, nodes, gpus, gpu_gib)
    findings: list[Any] = checks.diagnose(config, overrides or [], hardware, os.environ)
    for finding in findings:
        print(f"{finding.level:<8} {finding.subject:<15} {finding.text}")
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


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
