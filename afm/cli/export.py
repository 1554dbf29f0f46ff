"""``afm export``: the model of a checkpoint of `afm rl`, at any step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from afm.cli.rl import run_words

EXPORTER = "verl_ext.export"


def export(
    run: Annotated[
        Path,
        typer.Argument(
            help="output_dir of an `afm rl`, ended or not, or a folder of verl's checkpoints.",
            exists=True,
            file_okay=False,
        ),
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="Step of the checkpoint; the newest one by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New folder of the model; RUN/model_step_N by default.")
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option("--agent", help="Name or YAML of the agent; needed for stock verl's checkpoints only."),
    ] = None,
) -> None:
    """Export a checkpoint of `afm rl` as a model for `afm eval`, `afm ask` and `afm serve model`."""
    given = {"--step": step, "--out": out, "--agent": agent}
    options = [f"{name}={value}" for name, value in given.items() if value is not None]
    raise typer.Exit(run_words([sys.executable, "-P", "-m", EXPORTER, *options, "--", str(run)]))
