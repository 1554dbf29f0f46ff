"""Measure the effect of each part of the recipe: repeat RL from the SFT models of finished quickstarts.

    .venv/bin/python benchmarks/ablate_rl.py runs/measured --seeds 0 1 2 --out runs/ablation
    .venv/bin/python benchmarks/ablate_rl.py runs/measured-wiki --world wiki --seeds 0 1 2 --only ppo --out runs/ppo
    .venv/bin/python benchmarks/ablate_rl.py runs/measured --only recipe lora distillation --validate --out runs/teacher

RUNS is the output of `measure_quickstart.py`, a folder per seed. Every variant starts from the same SFT model, trains on the
same questions with the same seed and is evaluated on the same held-out questions. The figures of the full recipe come from
the quickstart. The teacher of `distillation` is the same seed's model after RL. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from timing import environment, report

CONFIGS = Path(__file__).resolve().parent.parent / "configs/tiny"
_ACTOR = "verl.actor_rollout_ref.actor"
_TIS = "verl.algorithm.rollout_correction.rollout_is"
VARIANTS = {
    "recipe": (),
    "without group filtering": ("verl.algorithm.filter_groups.enable=false",),
    "without clip-higher": (f"{_ACTOR}.clip_ratio_high=0.2",),
    "without TIS": (f"{_TIS}=null",),
    # The engine has no probabilities for tokens that it did not sample, so TIS cannot correct with them.
    "without masks": ("mask_observations=false", f"{_TIS}=null"),
    "curriculum": ("curriculum={}",),
    "ppo": (),
    "lora": (),
    "distillation": (),
}
RECIPES = {"ppo": "_ppo", "lora": "_lora", "distillation": "_distillation"}
"""Ends of the names of other recipes; all further variants change the world's own recipe."""
VALIDATION = (
    "verl.trainer.test_freq=1",
    "verl.actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "verl.actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
)
AGENTS = {"math": "math", "wiki": "mhqa"}


def afm(*words: str) -> None:
    """Run ``afm``; if it fails, end this program."""
    subprocess.run([sys.executable, "-m", "afm.cli.main", *words], check=True)


def serving(world: str, run: Path) -> AbstractContextManager[None]:
    """Run the server that the world's tool needs."""
    from afm.choices import WorldKind
    from afm.cli.recipes import RECIPES

    return RECIPES[WorldKind(world)].serving(run / "world") if world == "wiki" else nullcontext()


def questions(agent: str, run: Path, out: Path) -> Path:
    """Write the held-out questions of ``run`` as a file of ``val_files``."""
    from afm.agents import load_agent
    from afm.datasets import read_tasks
    from afm.datasets.rl_files import write_rl

    source, target = run / "world/heldout.jsonl", out / "heldout.parquet"
    out.mkdir(parents=True, exist_ok=True)
    write_rl(list(read_tasks(source)), load_agent(CONFIGS / f"agents/{agent}.yaml"), target, inputs=[source])
    return target


def one(world: str, variant: str, seed: int, run: Path, out: Path, validate: bool) -> dict[str, Any]:
    """Train a variant from the SFT model of ``run``, and evaluate it."""
    agent = AGENTS[world]
    config = CONFIGS / f"rl/{agent}{RECIPES.get(variant, '')}.yaml"
    model, held_out = out / "rl", out / "eval"
    if not (held_out / "metrics.json").exists():
        data = [f"model={run / 'sft'}", f"train_files={run / 'data/rl.parquet'}", f"output_dir={model}"]
        if variant == "distillation":
            data.append(f"teacher.model={run / 'rl/model'}")
        if validate:
            data += [f"val_files={questions(agent, run, out)}", *VALIDATION]
        with serving(world, run):
            afm("rl", str(config), *data, f"seed={seed}", *VARIANTS[variant])
            evaluation = str(CONFIGS / "eval" / f"{agent}_world.yaml")
            files = (f"model={model}", f"data={run / 'world/heldout.jsonl'}", f"output_dir={held_out}")
            afm("eval", evaluation, *files, f"seed={seed}")
    steps = [json.loads(line) for line in (model / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        "variant": variant,
        "seed": seed,
        "sft": json.loads((run / "eval_sft/metrics.json").read_text("utf-8"))["pass_at_1"]["value"],
        "rl": json.loads((held_out / "metrics.json").read_text("utf-8"))["pass_at_1"]["value"],
        "gain": gain(run, held_out),
        "seconds": round(sum(step["seconds"] for step in steps), 1),
        "entropy": [round(step["entropy"], 4) for step in steps],
        "reward": [round(step["reward"], 4) for step in steps],
        "validation": [step["validation_solved"] for step in steps if "validation_solved" in step],
        "groups_generated": [step["groups_generated"] for step in steps],
    }


def rewards(model: Path) -> list[float]:
    """Return the mean reward of each step."""
    return [json.loads(line)["reward"] for line in (model / "metrics.jsonl").read_text("utf-8").splitlines()]


def gain(run: Path, held_out: Path) -> dict[str, float]:
    """Return RL minus SFT on the same questions, with the 95 % interval."""
    from afm.evaluation import paired_difference
    from afm.trajectory.io import load_records

    before, after = (load_records(folder / "episodes.jsonl") for folder in (run / "eval_sft", held_out))
    found = paired_difference(before, after).difference
    return {"value": found.value, "low": found.low, "high": found.high}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table with a line per variant and seed."""
    yield "| variant | seed | SFT | RL | gain (95 %) | entropy, first -> last | s of training |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        change = row["gain"]
        yield (
            f"| {row['variant']} | {row['seed']} | {row['sft']:.3f} | {row['rl']:.3f} "
            f"| {change['value']:+.3f} ({change['low']:.3f} to {change['high']:.3f}) "
            f"| {row['entropy'][0]:.3f} -> {row['entropy'][-1]:.3f} | {row['seconds']:.0f} |"
        )


def draw(curves: dict[str, list[float]], out: Path) -> None:
    """Draw the reward by step of each variant as an SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, rewards in curves.items():
        steps = range(1, len(rewards) + 1)
        axes.plot(steps, rewards, label=name, linewidth=3 if name == "recipe" else 1.4)
    axes.set(xlabel="step", ylabel="mean reward of the batch", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(out, metadata={"Date": None})


def mean_curves(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the reward by step of each variant, averaged over its seeds."""
    found: dict[str, list[list[float]]] = {}
    for row in rows:
        found.setdefault(row["variant"], []).append(row["reward"])
    return {
        name: [sum(step) / len(step) for step in zip(*rewards, strict=False)]
        for name, rewards in found.items()
    }


def main() -> None:
    """Train, evaluate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--world", choices=AGENTS, default="math")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--only", nargs="+", choices=VARIANTS, default=[name for name in VARIANTS if name not in RECIPES]
    )
    parser.add_argument(
        "--validate", action="store_true", help="solve the held-out questions after each step"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    for variant in arguments.only:
        for seed in arguments.seeds:
            out = arguments.out / variant.replace(" ", "_") / f"seed{seed}"
            run = arguments.runs / f"seed{seed}"
            rows.append(one(arguments.world, variant, seed, run, out, arguments.validate))
    print("\n".join(table(rows)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    recipe = [
        {"variant": "recipe", "reward": rewards(arguments.runs / f"seed{n}/rl")} for n in arguments.seeds
    ]
    draw(
        mean_curves([*recipe, *(row for row in rows if row["variant"] != "recipe")]),
        arguments.out / "curves.svg",
    )
    result = {"benchmark": "ablate_rl", "world": arguments.world, "runs": rows}
    report(result | {"environment": environment(["verl", "torch", "afm"])}, arguments.out / "summary.json")


if __name__ == "__main__":
    main()
