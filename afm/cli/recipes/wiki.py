"""The quickstart's generated encyclopaedia: a multi-hop agent that searches it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from afm.cli.data import WorldKind
from afm.cli.recipes.recipe import Plan, Recipe
from afm.cli.recipes.wiki_server import wiki_server
from afm.distill import ScriptedWikiTeam
from afm.errors import ToolError
from afm.processes import tied_environment

PAGES = 4_000
HOPS = (1, 2)
_INDEX = "index"
_BUILD_LOG, _SERVER_LOG = "index.log", "wiki_server.log"


def make_world(folder: Path, plan: Plan, seed: int) -> None:
    """Write the encyclopaedia, three sets of questions that name different entities, and the search index."""
    from afm.datasets.encyclopaedia import Encyclopaedia, write_encyclopaedia
    from afm.datasets.mini_world import Split

    sizes = {Split.TRAIN: plan.train_tasks, Split.RL: plan.rl_tasks, Split.HELDOUT: plan.heldout_tasks}
    world = Encyclopaedia(PAGES, seed=seed, brief=True)
    write_encyclopaedia(folder, world, sizes=sizes, seed=seed, hops=HOPS)
    words = [sys.executable, "-P", "-m", "tool_servers.wiki_search.build", str(folder / "corpus.jsonl")]
    with (folder / _BUILD_LOG).open("wb") as log:
        done = subprocess.run(
            [*words, f"--out={folder / _INDEX}"], env=tied_environment(), stdout=log, stderr=log, check=False
        )
    if done.returncode != 0:
        raise ToolError(
            f"the search index was not built, status {done.returncode}; see {folder / _BUILD_LOG}"
        )


def serving(folder: Path) -> AbstractContextManager[None]:
    """A wiki server over the world's index."""
    return wiki_server(folder / _INDEX, folder / _SERVER_LOG)


def server_command(folder: Path) -> tuple[str, ...]:
    """How a person starts a server over the world's index."""
    return ("serve", "wiki", "--index", str(folder / _INDEX))


WIKI = Recipe(
    world=WorldKind.WIKI,
    agent="mhqa",
    tools="wiki_rag",
    folder=Path("runs/quickstart-wiki"),
    vocabulary_size=1024,
    whole_tags=True,
    heads=4,
    example="",
    full=Plan(train_tasks=14000, rl_tasks=2048, heldout_tasks=200),
    smoke=Plan(
        train_tasks=300,
        rl_tasks=64,
        heldout_tasks=8,
        sft=("max_steps=60", "save_steps=30"),
        rl=(
            "verl.trainer.total_training_steps=2",
            # Groups are not filtered: hardly any of them would differ yet.
            "verl.algorithm.filter_groups.enable=false",
            "verl.actor_rollout_ref.rollout.n=4",
            "verl.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
            "verl.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
        ),
    ),
    make_world=make_world,
    team=ScriptedWikiTeam,
    serving=serving,
    server_command=server_command,
)
