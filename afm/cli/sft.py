"""``afm sft``: supervised fine-tuning with LLaMA-Factory, as a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
) -> None:
    """Fine-tune on what the agent wrote; resumes an interrupted run, leaves a finished one alone."""
    from llamafactory_patch.launcher import run_sft  # light; the engine itself is a child process of it

    raise typer.Exit(run_sft(config, overrides or [], dry_run=dry_run, echo=not quiet))
