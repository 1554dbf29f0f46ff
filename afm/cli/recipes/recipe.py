"""One world of the quickstart: how much of everything, who teaches, and what its tool needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from afm.cli.data import WorldKind

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.distill import ScriptedTeam


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything; the overrides are ``key=value`` arguments of ``afm sft`` and ``afm rl``."""

    train_tasks: int
    rl_tasks: int
    heldout_tasks: int
    sft: tuple[str, ...] = ()
    rl: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """One world of the quickstart.

    Attributes:
        agent: Name of ``agents/``, ``sft/`` and ``rl/`` files below ``configs/tiny``, and of the data set.
        tools: Name of a file in ``configs/tiny/tools``.
        folder: Where a run goes when the user names no place.
        vocabulary_size: Most tokens of the tokenizer trained on the demonstrations.
        whole_tags: Whether tags become single tokens.
        heads: Attention heads of the model; fewer are wider, which names of many letters need more than digits.
        example: Question for ``afm ask``; the first held-out one when empty.
        full: Plan of a real run.
        smoke: Plan that proves the machinery and nothing else.
        make_world: Writes ``train.jsonl``, ``rl.jsonl``, ``heldout.jsonl`` and whatever the tool needs into a folder.
        team: The teacher, from agent and seed.
        serving: What the tool needs running, given the world's folder; the tool can be used while the block runs.
        server_command: The arguments of ``afm`` that a person runs for the same; empty when nothing has to run.
    """

    world: WorldKind
    agent: str
    tools: str
    folder: Path
    vocabulary_size: int
    whole_tags: bool
    heads: int
    example: str
    full: Plan
    smoke: Plan
    make_world: Callable[[Path, Plan, int], None]
    team: Callable[[AgentSpec, int], ScriptedTeam]
    serving: Callable[[Path], AbstractContextManager[None]]
    server_command: Callable[[Path], tuple[str, ...]]


def recipe_of(world: WorldKind) -> Recipe:
    """The recipe of a world."""
    if world is WorldKind.WIKI:
        from afm.cli.recipes.wiki import WIKI

        return WIKI
    from afm.cli.recipes.math import MATH

    return MATH
