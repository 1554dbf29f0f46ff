"""Experiment trackers: what they need is checked before a training starts, what they write lands beside the model."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from afm.errors import ConfigError, MissingExtraError
from llamafactory_patch.config import SftJob

SWANLAB_BOARD = "swanboard==0.1.10b2"
"""What SwanLab 0.10.3 needs for mode ``local``; without it, it logs an error and keeps nothing to look at."""

_SWANLAB_MODES = ("cloud", "local", "offline", "disabled")


def check_trackers(job: SftJob, env: Mapping[str, str]) -> None:
    """Whether the trackers that a configuration asks for are installed and can log in.

    Raises:
        ConfigError: A key is missing, or a setting makes no sense.
        MissingExtraError: A package is missing.
    """
    wanted = _report_to(job.config)
    if "swanlab" in wanted:
        raise ConfigError("report_to: swanlab works as use_swanlab=true (with swanlab_mode, swanlab_project)")
    if "tensorboard" in wanted:
        _require("tensorboard")
    if "wandb" in wanted:
        _check_wandb(env)
    if job.config.get("use_swanlab"):
        _check_swanlab(str(job.config.get("swanlab_mode") or "cloud"), env)


def tracker_settings(job: SftJob) -> dict[str, Any]:
    """Keys to add to what LLaMA-Factory receives, so that SwanLab writes into the output folder."""
    return {"swanlab_logdir": str(job.output_dir / "swanlab")} if job.config.get("use_swanlab") else {}


def tracker_variables(job: SftJob) -> dict[str, str]:
    """Environment variables by which TensorBoard and W&B write into the output folder."""
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
