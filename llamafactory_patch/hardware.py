"""Which computer of a training this is, as the environment says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from afm.errors import ConfigError
from afm.planning import positive_variable


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
