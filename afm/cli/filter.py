"""``afm data filter``: from the trajectories there are to those worth training on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import given_agent
from afm.errors import DataError, UsageError

if TYPE_CHECKING:
    from afm.distill import FilterPlan, FilterSummary, Funnel

_DEFAULT_AGENT = "math"


def filter_files(
    files: Annotated[
        list[Path], typer.Argument(help="Trajectory JSONL, plain or .gz.", exists=True, dir_okay=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of what is kept and what is dropped.")],
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML of filters, e.g. configs/filters/mhqa.yaml; by default the agent's rules and the reward.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="A shipped agent's name or a YAML; by default the one in --config.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that filter.")] = 1,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            help="Evaluation set (tasks as JSONL or parquet) whose questions must not occur; may be repeated.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    reward: Annotated[
        Path | None, typer.Option(help="Reward YAML, without --config.", exists=True, dir_okay=False)
    ] = None,
    min_score: Annotated[
        float | None, typer.Option(help="Lowest score that is kept, without --config; 1 by default.")
    ] = None,
    picture: Annotated[bool, typer.Option(help="Draw the funnel as funnel.png.")] = True,
) -> None:
    """Filter trajectories stage by stage; every dropped row stands with its reason in `dropped.jsonl`.

    Killed or interrupted, the same command continues where it was. The result does not depend on --processes.
    """
    from afm.cli.progress import ProgressView
    from afm.distill.filters import filter_files as run

    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; expected a folder")
    if config is not None and (reward is not None or min_score is not None):
        raise UsageError("--reward and --min-score are settings of `quality` in the file that --config names")
    plan = _plan(config, reward, min_score).against(against or [])
    spec = given_agent(agent or plan.agent or _DEFAULT_AGENT)
    view = ProgressView()
    summary = run(
        files,
        plan,
        spec,
        out,
        processes=processes,
        picture=picture,
        on_rows=lambda rows: view.update("rows", rows, None),
    )
    view.line(_headline(summary))
    _show(summary.funnel)
    for note in _notes(plan, summary.funnel):
        print(f"note: {note}")
    if not summary.funnel.kept:
        raise DataError("no trajectory was kept; the reasons stand in dropped.jsonl", path=str(out))


def _plan(config: Path | None, reward: Path | None, min_score: float | None) -> FilterPlan:
    from afm.distill import FilterPlan
    from afm.distill.filters import load_plan

    if config is not None:
        return load_plan(config)
    quality = {"min_score": 1.0 if min_score is None else min_score, "reward": reward}
    return FilterPlan.model_validate({"stages": [{"format": {}}, {"quality": quality}]})


def _headline(summary: FilterSummary) -> str:
    funnel = summary.funnel
    copies = f" and {funnel.copies} copies" if funnel.copies else ""
    resumed = f", {summary.resumed} of them by an earlier call" if summary.resumed else ""
    return f"{summary.folder}: {funnel.kept} of {funnel.seen} kept{copies}{resumed}"


def _show(funnel: Funnel) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    for column in ("rows", "dropped", "left", "left of all"):
        table.add_column(column, justify="right")
    for stage in funnel.stages():
        share = f"{stage.left / funnel.seen:.1%}" if funnel.seen else "-"
        table.add_row(stage.name, str(stage.rows), str(stage.dropped), str(stage.left), share)
    Console(highlight=False).print(table)


def _notes(plan: FilterPlan, funnel: Funnel) -> list[str]:
    """What a person would otherwise believe was done."""
    notes = []
    if any(stage.contamination is not None and not stage.contamination.tasks for stage in plan.stages):
        notes.append("contamination compared with nothing; name evaluation sets by --against")
    if funnel.dropped["unreadable"]:
        notes.append(f"{funnel.dropped['unreadable']} lines are no records; see unreadable.jsonl")
    return notes
