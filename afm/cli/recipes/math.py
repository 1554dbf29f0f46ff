"""The quickstart's world of word problems: a math agent that runs programs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from afm.cli.data import WorldKind
from afm.cli.recipes.recipe import Plan, Recipe
from afm.distill import ScriptedMathTeam


def make_world(folder: Path, plan: Plan, seed: int) -> None:
    """Write the three disjoint sets of problems."""
    from afm.datasets import write_tasks
    from afm.datasets.mini_world import Split, generate

    sizes = {Split.TRAIN: plan.train_tasks, Split.RL: plan.rl_tasks, Split.HELDOUT: plan.heldout_tasks}
    for split, count in sizes.items():
        write_tasks(generate(split, count, seed=seed), folder / f"{split}.jsonl")


MATH = Recipe(
    world=WorldKind.MATH,
    agent="math",
    tools="code_executor",
    folder=Path("runs/quickstart"),
    vocabulary_size=512,
    whole_tags=False,
    heads=8,
    example="Tom has 57 coins. Tom finds 38 more. How many coins does Tom have?",
    full=Plan(train_tasks=6000, rl_tasks=4096, heldout_tasks=200),
    smoke=Plan(
        train_tasks=400,
        rl_tasks=64,
        heldout_tasks=8,
        sft=("max_steps=120", "save_steps=40"),
        # Groups are not filtered: hardly any of them would differ yet.
        rl=("verl.trainer.total_training_steps=2", "verl.algorithm.filter_groups.enable=false"),
    ),
    make_world=make_world,
    team=ScriptedMathTeam,
    serving=lambda _: nullcontext(),
    server_command=lambda _: (),
)
