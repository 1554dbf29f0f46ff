"""A team that is trained and becomes one model, next to one model: score, tokens and calls on the quickstart's wiki world.

    .venv/bin/python benchmarks/team_gain.py --seeds 0 1 2 --out runs/team_gain --record benchmarks/team_gain.json

Five systems answer the same held-out questions with the same search tool:

- `sft` and `dapo`: the quickstart's one model after fine-tuning and after reinforcement;
- `team untrained`: the five members of `bench_team.py`, played by one model that was fine-tuned on each member's part;
- `team trained`: the same after `afm rl` with the team as the policy, for as many steps of fewer episodes than `dapo`;
- `distilled`: one model, fine-tuned like `sft`, on the trajectories of the trained team.

All start from the same random weights. Members are taught from the weights of `sft`. Finished stages are not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from bench_team import lessons, write_team
from timing import REPO, environment

from afm.cli.options import configs_folder
from afm.cli.pipeline import STAGES_FILE, Quickstart, Stage, read_stages, run_engine, run_stages
from afm.cli.recipes import WIKI, RecipeSizes
from afm.cli.train import LAUNCHER, TRAINER
from afm.errors import EngineError
from afm.terminal import ProgressView

SYSTEMS = {
    "sft": "eval_sft",
    "dapo": "eval_rl",
    "team untrained": "eval_team",
    "team trained": "eval_team_rl",
    "distilled": "eval_distilled",
}
"""The folder of each system's evaluation."""
COMPARED = (("dapo", "sft"), ("team trained", "team untrained"), ("distilled", "sft"), ("distilled", "dapo"))
MAX_PROMPT_TOKENS = 384
"""Of a member's request, which holds the question, or what a search returned."""


REPEATS = 100
"""Most rows of a lesson. The reflector's reply is always the same, and had a third of the tokens with a loss. A model that
was taught all of it copied the last word of a name, and guessed the first: the team solved 12.5 %."""


@dataclass(frozen=True)
class TeamSizes:
    """Sizes of the team's stages. The overrides are ``key=value`` arguments of ``afm sft`` and ``afm rl``.

    Attributes:
        scripted: Whether the scripted team's trajectories replace those of the trained team. A smoke needs it, because
            its team answers nothing.
    """

    distilled_tasks: int
    members: tuple[str, ...]
    rl: tuple[str, ...]
    sft: tuple[str, ...]
    scripted: bool = False


def _rl(steps: int, batch: int, samples: int, *more: str) -> tuple[str, ...]:
    """Overrides of reinforcement without filtering of groups; parts of a mini batch divide ``4 * samples``."""
    rollout, actor = "verl.actor_rollout_ref.rollout", "verl.actor_rollout_ref.actor"
    return (
        f"verl.trainer.total_training_steps={steps}",
        "verl.algorithm.filter_groups.enable=false",
        f"verl.data.train_batch_size={batch}",
        f"{rollout}.n={samples}",
        f"{actor}.ppo_micro_batch_size_per_gpu={4 * samples}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={4 * samples}",
        *more,
    )


_ACTOR = "verl.actor_rollout_ref.actor"
FEWER_UPDATES = (f"{_ACTOR}.ppo_mini_batch_size=8", f"{_ACTOR}.ppo_epochs=1", f"{_ACTOR}.optim.lr=1e-4")
"""An episode has about seven sequences, so one agent's settings gave 14 updates in each of two passes, where one agent has
2. With them and lr 3e-4 a team fell from .830 to .010 in 15 steps. With these values, a team that began at .125 kept its
format, and had rewards of .00 to .27 in each of 15 steps."""
FULL = TeamSizes(4000, ("max_steps=2600",), _rl(15, 8, 6, *FEWER_UPDATES), ())
SMOKE = TeamSizes(
    60,
    ("max_steps=30", "save_steps=30"),
    _rl(1, 4, 2, "verl.trainer.save_freq=1"),
    ("max_steps=30", "save_steps=30"),
    scripted=True,
)
QUICKSTART_SMOKE = RecipeSizes(
    train_tasks=300,
    rl_tasks=64,
    heldout_tasks=8,
    sft=("max_steps=30", "save_steps=30"),
    rl=_rl(1, 4, 2, "verl.trainer.save_freq=1"),
)


@dataclass(frozen=True)
class TeamQuickstart(Quickstart):
    """The quickstart of the wiki world, followed by the team's stages."""

    team: TeamSizes = FULL

    def stages(self) -> list[Stage]:
        """Everything to do, in order."""
        held_out = self.world / "heldout.jsonl"
        return [
            *super().stages(),
            Stage("members", "teach one model the part of every member (LLaMA-Factory)", self.members),
            Stage("eval_team", "evaluate the team", lambda: self.evaluate_team("members", "eval_team")),
            Stage("rl_team", "reinforce the team (verl)", self.reinforce_team),
            Stage(
                "eval_team_rl",
                "evaluate the trained team",
                lambda: self.evaluate_team("rl_team", "eval_team_rl"),
            ),
            Stage("distill_team", "let the trained team solve the training problems", self.distill_team),
            Stage(
                "sft_team", "fine-tune one model on the team's trajectories (LLaMA-Factory)", self.sft_team
            ),
            Stage(
                "eval_distilled",
                "evaluate the distilled model",
                lambda: self.evaluate("sft_team", held_out, "eval_distilled"),
            ),
        ]

    @property
    def team_file(self) -> Path:
        """The team's YAML."""
        return self.out / "team/team.yaml"

    def members(self) -> str:
        """Write each member's part in the quickstart's demonstrations, and fine-tune on it."""
        from afm.datasets.sft_files import register, write_array

        self.team_file.parent.mkdir(exist_ok=True)
        write_team(self.team_file.parent, "http://127.0.0.1:9/v1")  # the address is not used
        data = self.out / "data_members"
        data.mkdir(exist_ok=True)
        rows = write_array(self._lessons(), data / "members.json", "the scripted team looked nothing up")
        register(data, "members", "members.json", {"messages": "messages"}, "openai_messages")
        own = [
            f"model_name_or_path={self.out / 'sft'}",
            f"dataset_dir={data}",
            "dataset=members",
            "agent=null",
            "ignore_observation=false",
            "match_chat_template=true",
            "prompt_check=false",
        ]
        self._train("sft", self._config("sft"), "members", *own, *self.team.members)
        return f"{rows} lessons; model in {self.out / 'members'}"

    def _lessons(self) -> Iterator[dict[str, Any]]:
        taught = Counter[str]()
        for system, user, reply in lessons(self.out / "distill/events.jsonl"):
            lesson = json.dumps([system, user, reply])
            if taught[lesson] == REPEATS:
                continue
            taught[lesson] += 1
            texts = {"system": system, "user": user, "assistant": json.dumps(reply)}
            yield {"messages": [{"role": role, "content": text} for role, text in texts.items()]}

    def reinforce_team(self) -> str:
        """Run verl with the team as the policy."""
        recipe = {
            "extends": str(self._config("rl")),
            "tools": None,
            "harness": {"team": str(self.team_file), "concurrency": 16},
            "rewards": {"formula": "correct", "overlong": None},  # a team needs more tokens than one model
            "verl": {"data": {"max_prompt_length": MAX_PROMPT_TOKENS}},
        }
        file = self.out / "team/rl.yaml"
        file.write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
        files = [f"{key}={self.out / 'data/rl.parquet'}" for key in ("train_files", "val_files")]
        with self.recipe.serving(self.world):
            self._train("rl", file, "rl_team", f"model={self.out / 'members'}", *files, *self.team.rl)
        return f"model in {self.out / 'rl_team'}"

    def evaluate_team(self, model: str, name: str) -> str:
        """Let a model play all members on the held-out questions."""
        from afm.distill.team_policy import player_of
        from afm.evaluation.config import EvalConfig, ModelSettings
        from afm.evaluation.job import run_job
        from afm.harness.settings import HarnessSettings

        settings = EvalConfig(
            name=name,
            data=(self.world / "heldout.jsonl",),
            agent=str(self._config("agents")),
            model=ModelSettings(path=str(self.out / model)),
            harness=HarnessSettings(team=self.team_file, concurrency=32),
            prompt_check=False,
            seed=self.seed,
            output_dir=self.out / name,
        )
        with self.recipe.serving(self.world):
            job = run_job(settings, open_harness=player_of, on_progress=self._count_episodes)
            score = asyncio.run(job).pass_at_1
        return f"pass@1 {score.value:.3f} ({score.low:.3f} to {score.high:.3f})" if score else "no score"

    def distill_team(self) -> str:
        """Run ``afm data distill`` with the trained team on the first training problems."""
        tasks = self.out / "team/tasks.jsonl"
        with (self.world / "train.jsonl").open(encoding="utf-8") as source:
            tasks.write_text("".join(islice(source, self.team.distilled_tasks)), encoding="utf-8")
        policy = {
            "harness": {"team": str(self.team_file)},
            "model": str(self.out / "rl_team"),
            "agent": str(self._config("agents")),
        }
        file = self.out / "team/trained.yaml"
        file.write_text(json.dumps(policy, indent=1) + "\n", encoding="utf-8")
        words = [str(tasks), f"--output-dir={self.out / 'distill_team'}", f"--team={file}"]
        words += ["--max-parallel=32", f"--seed={self.seed}"]
        with self.recipe.serving(self.world):
            try:
                words = ["afm.cli.main", "data", "distill", *words]
                run_engine("data distill", *words, folder=self.out / "distill_team")
            except EngineError:
                if not self.team.scripted:
                    raise
                return "no trajectory"
        return f"trajectories in {self.out / 'distill_team'}"

    def sft_team(self) -> str:
        """Fine-tune the fresh model on the team's trajectories, as the quickstart does on the scripted team's."""
        from afm.datasets.sft_files import write_sft
        from afm.trajectory.io import load_records

        folder = "distill" if self.team.scripted else "distill_team"
        data, source = self.out / "data_team", self.out / folder / "trajectories.jsonl"
        rows = write_sft(load_records(source), self.spec, data, name=self.recipe.agent, inputs=[source])
        own = [
            f"model_name_or_path={self.start}",
            f"dataset_dir={data}",
            f"dataset={self.recipe.agent}",
        ]
        self._train("sft", self._config("sft"), "sft_team", *own, *self.team.sft)
        return f"{rows} demonstrations; model in {self.out / 'sft_team'}"

    def _train(self, command: str, config: Path, name: str, *overrides: str) -> None:
        """Run ``afm sft`` or ``afm rl`` into a folder of this run."""
        quiet = ["--quiet"] if command == "sft" else []
        words = [*quiet, str(config), *overrides, f"output_dir={self.out / name}", f"seed={self.seed}"]
        run_engine(command, TRAINER if command == "sft" else LAUNCHER, *words, folder=self.out / name)


def run(seed: int, out: Path, smoke: bool) -> dict[str, Any]:
    """Train and evaluate all systems with one seed, and return the row of the record."""
    view, load = ProgressView(), os.getloadavg()[0]
    plan, team = (QUICKSTART_SMOKE, SMOKE) if smoke else (replace(WIKI.full, rl=_rl(15, 8, 8)), FULL)
    job = TeamQuickstart(out, configs_folder(), WIKI, plan, seed, None, view.update, team=team)
    run_stages(job.stages(), out, {"seed": seed, "smoke": smoke, "recipe": job.recipe_digest()}, view.line)
    steps = [json.loads(line) for line in (out / "rl_team/metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        "seed": seed,
        "smoke": smoke,
        "systems": {name: used(out / folder) for name, folder in SYSTEMS.items()},
        "differences": {f"{new} - {old}": difference(out, old, new) for new, old in COMPARED},
        "team_reward": [round(step["reward"], 4) for step in steps],
        "team_sequences": [round(step.get("trajectories", 1), 3) for step in steps],
        "wrong_tokens": sum(step["token_drift"] for step in steps),
        "seconds": {stage.name: stage.seconds for stage in read_stages(out / STAGES_FILE)},
        "load_before_and_after": [load, os.getloadavg()[2]],
        "environment": environment(["torch", "verl", "llamafactory"]),
    }


def used(folder: Path) -> dict[str, Any]:
    """Score of an evaluation, and means of what a question used."""
    from afm.trajectory.io import load_records

    metrics = json.loads((folder / "metrics.json").read_text("utf-8"))
    costs = [record.cost for record in load_records(folder / "episodes.jsonl") if record.cost is not None]
    kinds = ("prompt_tokens", "agent_tokens", "observation_tokens", "generations", "tool_calls")
    return {
        "pass_at_1": metrics["pass_at_1"],
        "scored": metrics["scored"],
        "errors": metrics["errors"],
    } | {kind: round(fmean(getattr(cost, kind) for cost in costs), 2) for kind in kinds}


def difference(out: Path, old: str, new: str) -> dict[str, float]:
    """The paired difference of two systems in pass@1, with its 95 % interval."""
    from afm.evaluation import paired_difference
    from afm.trajectory.io import load_records

    before, after = (load_records(out / SYSTEMS[name] / "episodes.jsonl") for name in (old, new))
    found = paired_difference(before, after).difference
    return {"value": found.value, "low": found.low, "high": found.high}


def keep(row: dict[str, Any], record: Path) -> None:
    """Put a row into the record, in place of an older one of the same seed."""
    rows = json.loads(record.read_text("utf-8"))["runs"] if record.exists() else []
    rows = sorted(
        [*(other for other in rows if other["seed"] != row["seed"]), row], key=lambda each: each["seed"]
    )
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"benchmark": "team_gain", "runs": rows}, indent=1) + "\n", "utf-8")


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown, one line for each seed and system."""
    yield "| seed | system | pass@1 (95 %) | sampled tokens | requests | searches |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        for name, seen in row["systems"].items():
            score = seen["pass_at_1"] or dict.fromkeys(("value", "low", "high"), float("nan"))
            yield (
                f"| {row['seed']} | {name} | {score['value']:.3f} ({score['low']:.3f} to {score['high']:.3f}) "
                f"| {seen['agent_tokens']:.0f} | {seen['generations']:.1f} | {seen['tool_calls']:.2f} |"
            )


def main() -> None:
    """Run what is not finished, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=REPO / "runs/team_gain")
    parser.add_argument(
        "--record", type=Path, help="JSON file that keeps the rows [default: OUT/team_gain.json]"
    )
    parser.add_argument("--smoke", action="store_true", help="very few training steps")
    options = parser.parse_args()
    out = options.out.resolve()
    rows = []
    for seed in options.seeds:
        rows.append(run(seed, out / f"seed{seed}", options.smoke))
        keep(rows[-1], options.record or out / "team_gain.json")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
