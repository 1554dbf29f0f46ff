"""``afm report``: one page about a run, or about several beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afm.errors import UsageError


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR...",
            help="A quickstart run, the out_dir of an evaluation, or the output_dir of `afm sft` or `afm rl`. "
            "Several: out_dirs of evaluations, compared with the first.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page to write (.html); by default report.html, of several comparison.html, in the first RUN_DIR."
        ),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare although settings differ that are not the model's.")
    ] = False,
    view_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Where `afm view` will listen when links are followed.")
    ] = 8765,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Write one self-contained HTML page: scores, published ones beside them, curves, failures, trajectories.

    The same stands beside it as Markdown (.md) and JSON (.json).
    """
    for folder in run_dirs:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; expected a run or the out_dir of an evaluation")
    if anyway and len(run_dirs) < 2:
        raise UsageError("--anyway goes with several runs: afm report BEFORE AFTER --anyway")
    if out is not None and out.suffix in {".md", ".json"}:
        raise UsageError(
            f"--out {out}: expected the name of the page (.html); Markdown and JSON are written beside it"
        )
    from afm.evaluation.report import write_comparison, write_run_report

    if len(run_dirs) > 1:
        target = out or run_dirs[0] / "comparison.html"
        path = write_comparison(run_dirs, target, anyway=anyway, view_port=view_port)
    else:
        path = write_run_report(run_dirs[0], out or run_dirs[0] / "report.html", view_port=view_port)
    print(path)
    if show:
        typer.launch(path.resolve().as_uri())
