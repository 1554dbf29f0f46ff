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


@dataclass(frozen=True, slots=True)
class Node:
    """This computer among those of a training; they count from 0."""

    number: int = 0
    count: int = 1


def this_node(env: Mapping[str, str]) -> Node:
    """What ``NNODES`` and ``NODE_RANK`` say; one node need not say anything.

    Raises:
        ConfigError: They contradict each other, or leave open who is who: two first nodes would wait for each other.
    """
    positive_variable(env, "NPROC_PER_NODE", 1)
    count = positive_variable(env, "NNODES", 1)
    text = env.get("NODE_RANK") or ("0" if count == 1 else "")
    if not text.isascii() or not text.isdigit() or int(text) >= count:
        raise ConfigError(
            f"NODE_RANK: set it to the number of this node (scripts: RANK), a number below NNODES={count}; got {text!r}"
        )
    if count > 1 and not env.get("MASTER_ADDR"):
        raise ConfigError(f"MASTER_ADDR: set it to the host name of node 0, since NNODES={count}")
    return Node(int(text), count)


def positive_variable(env: Mapping[str, str], name: str, default: int) -> int:
    """A count that the environment holds; unset or empty is the default.

    Raises:
        ConfigError: It is no positive whole number.
    """
    text = env.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{name}={text}: expected a positive whole number")
    return int(text)
