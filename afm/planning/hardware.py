"""Where a training is meant to run, as options, the environment or the recipe's header say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from afm.errors import ConfigError

_HEADER = re.compile(r"^# Hardware: (\d+) nodes? x (\d+) GPUs of (\d+) GB", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Equal nodes with equal GPUs."""

    nodes: int = 1
    gpus: int = 8
    gpu_gib: float = 80.0

    @property
    def world(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus

    def __str__(self) -> str:
        """``2 nodes x 8 GPUs of 80 GB``, as in the header of a recipe."""
        return f"{self.nodes} node{'s' * (self.nodes > 1)} x {self.gpus} GPUs of {self.gpu_gib:g} GB"


def recipe_hardware(config_file: Path) -> Hardware | None:
    """What the line ``# Hardware: N nodes x M GPUs of G GB`` in a recipe's header says, if there is one."""
    try:
        found = _HEADER.search(config_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return Hardware(int(found[1]), int(found[2]), float(found[3])) if found else None


def hardware_from(
    env: Mapping[str, str], config_file: Path, nodes: int | None, gpus: int | None, gpu_gib: float | None
) -> Hardware:
    """The options given, else what the environment says about the job, else the recipe's header.

    Raises:
        ConfigError: A variable is no positive number.
    """
    written = recipe_hardware(config_file) or Hardware()
    return Hardware(
        nodes or positive_variable(env, "NNODES", written.nodes),
        gpus or positive_variable(env, "NPROC_PER_NODE", written.gpus),
        gpu_gib or written.gpu_gib,
    )


def positive_variable(env: Mapping[str, str], name: str, default: int) -> int:
    """A count that the environment holds; unset or empty is the default.

    Raises:
        ConfigError: It is no positive whole number.
    """
    text = env.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{name}={text}: expected a positive whole number")
    return int(text)
