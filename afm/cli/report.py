"""``afm report``: one page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afm.errors import UsageError


def report(
    run_dir: Annotated[
        Path,
        typer.Argument(
            help="A quickstart run, the out_dir of an evaluation, or the output_dir of `afm sft` or `afm rl`."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page to write; RUN_DIR/report.html by default.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Write one self-contained HTML page: scores, curves, and trajectories side by side."""
    if not run_dir.is_dir():
        raise UsageError(f"{run_dir}: no such folder; expected a run or the out_dir of an evaluation")
    from afm.evaluation.report import write_run_report

    path = write_run_report(run_dir, out or run_dir / "report.html")
    print(path)
    if show:
        typer.launch(path.resolve().as_uri())
