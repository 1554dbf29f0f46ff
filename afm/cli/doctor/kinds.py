"""Configurations told apart by their content: training, reinforcement learning, evaluation, tools."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from afm.configuration import override_key, read_extended
from afm.errors import ConfigError


class Kind(StrEnum):
    """The command that a configuration is for, or what it declares."""

    SFT = "afm sft"
    RL = "afm rl"
    EVAL = "afm eval"
    TOOLS = "tools"


_KEYS = {
    Kind.RL: frozenset({"train_files", "val_files", "verl", "platform"}),
    Kind.SFT: frozenset(
        {"model_name_or_path", "dataset", "stage", "finetuning_type", "template", "cutoff_len"}
    ),
    Kind.EVAL: frozenset({"benchmark", "data", "rounds", "out_dir"}),
}
"""Keys that one kind alone has."""
_SHARED = frozenset({"rewards", "limits"})
"""Of reinforcement learning and evaluation; the former where nothing else tells."""
_OF_TOOLS = frozenset({"tools", "cassette"})


def kind_of(config: Path, overrides: Sequence[str]) -> Kind:
    """Whose configuration it is.

    Raises:
        ConfigError: It cannot be read, or is of none or of two of them.
    """
    content = read_extended(config, "settings")
    keys = set(content) | {override_key(override).partition(".")[0] for override in overrides}
    if set(content) <= _OF_TOOLS and isinstance(content.get("tools"), list):
        return Kind.TOOLS
    found = {kind: sorted(keys & own) for kind, own in _KEYS.items() if keys & own}
    if len(found) == 1:
        return next(iter(found))
    if not found and keys & _SHARED:
        return Kind.RL
    expected = "; ".join(f"`{kind}` ({', '.join(sorted(own))})" for kind, own in _KEYS.items())
    told = f"none of them; it has {sorted(keys)}"
    if found:
        (one, its), (other, others), *_ = found.items()
        told = f"both {its[0]!r} of `{one}` and {others[0]!r} of `{other}`"
    raise ConfigError(f"{config}: expected keys of {expected}, or a list of `tools`; found {told}")
