"""``afm data merge``: what a gateway recorded of a team, as trajectories of an agent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afm.cli.convert import OnBadRows
from afm.cli.options import given_agent
from afm.errors import DataError


def merge(
    log: Annotated[Path, typer.Argument(help="Log of `afm serve gateway`.", exists=True, dir_okay=False)],
    team: Annotated[
        Path, typer.Option("--map", help="YAML as those in configs/teams.", exists=True, dir_okay=False)
    ],
    tasks: Annotated[Path, typer.Option(help="The tasks, as JSONL or parquet.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder of trajectories.jsonl, dropped.jsonl, manifest.json.")],
    agent: Annotated[str, typer.Option(help="A shipped agent's name or a YAML.")] = "mhqa",
    name: Annotated[str, typer.Option(help="Name of the team in the trajectories.")] = "",
    on_bad_rows: Annotated[
        OnBadRows,
        typer.Option(
            help="Stop at a line of the log that cannot be read, or go on without it and without attempts that miss it."
        ),
    ] = OnBadRows.ERROR,
) -> None:
    """Turn a team's recorded model calls into one trajectory a task, or say why not.

    What is dropped stands with its reason in `dropped.jsonl`, lines that cannot be read in `unreadable.jsonl`.
    """
    from afm.cli.progress import ProgressView
    from afm.datasets import read_tasks
    from afm.distill.gateway_merge import UNREADABLE_FILE, merge_gateway_log
    from afm.distill.team_map import TeamMap

    spec = given_agent(agent)
    view = ProgressView()
    merged = merge_gateway_log(
        log,
        read_tasks(tasks),
        spec,
        TeamMap.read(team, spec),
        out,
        name=name or log.parent.name,
        drop_bad_lines=on_bad_rows is OnBadRows.DROP,
        progress=view.update,
    )
    dropped = sum(merged.dropped.values())
    spent = f", {merged.cost_usd:.2f} USD" if merged.cost_usd else ""
    view.line(f"{merged.path}: {merged.kept} of {merged.kept + dropped} attempts kept{spent}")
    for reason, count in sorted(merged.dropped.items()):
        print(f"  dropped: {count} {reason}")
    if merged.unreadable:
        print(f"  lines that cannot be read: {merged.unreadable}, listed in {out / UNREADABLE_FILE}")
    if merged.missing:
        print(f"  tasks without a call in the log: {merged.missing}")
    if not merged.kept:
        raise DataError("no trajectory was kept; the reasons stand in dropped.jsonl", path=str(out))
