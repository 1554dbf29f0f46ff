"""``afm sft``, ``afm rl``, ``afm export``: each engine as a process of its own, and the model of a checkpoint."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from afm.cli.options import TrustOption
from afm.errors import MissingExtraError
from afm.processes import tied_environment


def sft(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML of the run, for example configs/tiny/sft/math.yaml.", exists=True, dir_okay=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Overrides, for example learning_rate=1e-5 output_dir=runs/a."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved command and settings, start nothing.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Write the trainer's output to its log only.")
    ] = False,
) -> None:
    """Fine-tune a model on trajectories with LLaMA-Factory.

    If interrupted, run the same command again to resume. A finished run is left alone. `afm list recipes` lists the shipped
    files, `afm doctor CONFIG` checks one first. The exit status is the trainer's.

    Example: afm sft configs/tiny/sft/math.yaml output_dir=runs/sft
    """
    from llamafactory_patch.launcher import run_sft  # light; the engine itself is a child process of it

    raise typer.Exit(run_sft(config, overrides or [], dry_run=dry_run, echo=not quiet))


LAUNCHER = "verl_ext.launcher"


def rl(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML of the run, for example configs/tiny/rl/math.yaml.", exists=True, dir_okay=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Overrides, for example seed=1 verl.trainer.save_freq=5."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved command, check it, start nothing.")
    ] = False,
    trust: TrustOption = False,
) -> None:
    """Train an agent by reinforcement learning, with verl.

    If interrupted, run the same command again to resume from the last checkpoint. `afm list recipes` lists the shipped
    files, `afm doctor CONFIG` checks one first. The exit status is the trainer's.

    Example: afm rl configs/tiny/rl/math.yaml output_dir=runs/rl
    """
    if importlib.util.find_spec("verl") is None:
        raise MissingExtraError("verl", "rl")
    options = ["--dry-run"] if dry_run else []
    words = [sys.executable, "-P", "-m", LAUNCHER, *options, str(config), *(overrides or [])]
    raise typer.Exit(run_words(words))


def run_words(words: list[str]) -> int:
    """Run ``words`` as a process, hand signals on, and return the exit status."""
    with subprocess.Popen(words, env=tied_environment()) as process:
        # A terminal sends Ctrl-C to both: the launcher stops the trainer, this process only waits for it.
        before = {
            signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None),
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: process.terminate()),
        }
        try:
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return status if status >= 0 else 128 - status


EXPORTER = "verl_ext.export"


def export(
    run: Annotated[
        Path,
        typer.Argument(
            help="output_dir of an `afm rl`, finished or not, or a folder of verl's checkpoints.",
            exists=True,
            file_okay=False,
        ),
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="Step of the checkpoint [default: the newest].")
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="New folder for the model [default: RUN/model_step_N]."),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option("--agent", help="Shipped agent or YAML; needed only for checkpoints of stock verl."),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the LoRA adapter alone, as peft does, not merged.")
    ] = False,
) -> None:
    """Export a checkpoint of `afm rl` as a model for `afm eval`, `afm ask` and `afm serve model`."""
    values = {"--step": step, "--output-dir": output_dir, "--agent": agent}
    options = [f"{name}={value}" for name, value in values.items() if value is not None]
    options += ["--adapter"] * adapter
    raise typer.Exit(run_words([sys.executable, "-P", "-m", EXPORTER, *options, "--", str(run)]))
