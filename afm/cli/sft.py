"""``afm sft``: supervised fine-tuning with LLaMA-Factory, as a process of its own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

LAUNCHER = "llamafactory_patch.launcher"
GRID = "llamafactory_patch.grid"


def sft(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML of the run, for example configs/tiny/sft/math.yaml.", exists=True, dir_okay=False
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, for example learning_rate=1e-5 output_dir=runs/a.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved command and configuration, start nothing.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Write the trainer's output to its log only.")
    ] = False,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid", help="key=value,value (may be repeated): train every combination; lr, batch, epochs."
        ),
    ] = None,
) -> None:
    """Fine-tune on what the agent wrote; continues an interrupted run, leaves a finished one alone.

    With --grid, every combination is trained below output_dir, and grid.csv there compares them.
    """
    if grid:
        grids = importlib.import_module(GRID)
        raise typer.Exit(grids.run_grid(config, overrides or [], grid, dry_run=dry_run, echo=not quiet))
    launcher = importlib.import_module(LAUNCHER)  # light; the engine itself is a child process of it
    raise typer.Exit(launcher.run_sft(config, overrides or [], dry_run=dry_run, echo=not quiet))
