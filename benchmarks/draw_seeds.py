r"""Draw the mean reward by step of several RL runs, with a panel per recipe and a thin line per seed.

    .venv/bin/python benchmarks/draw_seeds.py --out docs/images/rl_seeds.svg \
        --panel "math, DAPO" runs/measured/seed*/rl --panel "wiki, PPO" runs/ppo/ppo/seed*/rl

Each folder is the output of one `afm rl`. The thick line is their mean.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def rewards(run: Path) -> list[float]:
    """Return the mean reward of each step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [float(json.loads(line)["reward"]) for line in lines]


def draw(panels: dict[str, list[list[float]]], out: Path) -> None:
    """Draw an SVG with a panel per recipe."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "afm"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4 * len(panels), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for place, (title, seeds) in zip(axes[0], panels.items(), strict=True):
        for number, seed in enumerate(seeds):
            place.plot(range(1, len(seed) + 1), seed, linewidth=1.1, alpha=0.8, label=f"seed {number}")
        mean = [sum(step) / len(step) for step in zip(*seeds, strict=False)]
        place.plot(range(1, len(mean) + 1), mean, color="black", linewidth=2.4, label="mean")
        place.set(title=title, xlabel="step", ylim=(0, 1))
        place.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean reward of all samples")
    axes[0][0].legend(fontsize=8, loc="lower right")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    """Read the runs and draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--panel", nargs="+", action="append", required=True, metavar=("TITLE", "RUN"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    draw({title: [rewards(Path(run)) for run in runs] for title, *runs in given.panel}, given.out)


if __name__ == "__main__":
    main()
