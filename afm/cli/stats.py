"""``afm data stats``: what a set of trajectories is like, on the terminal and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afm.cli.options import given_agent
from afm.errors import DataError, UsageError

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.evaluation.data_stats import DataStats, FunnelStage

FUNNEL_FILE = "funnel.json"


def stats(
    files: Annotated[list[Path], typer.Argument(help="Trajectory JSONL.", exists=True, dir_okay=False)],
    out: Annotated[Path | None, typer.Option(help="The page to write, e.g. report.html.")] = None,
    agent: Annotated[
        str | None, typer.Option(help="Whose trajectories they are; by default what each row says.")
    ] = None,
    funnel: Annotated[
        list[Path] | None,
        typer.Option(help="A funnel.json; by default those beside the files.", exists=True, dir_okay=False),
    ] = None,
    samples: Annotated[int, typer.Option(min=0, max=200, help="Trajectories shown on the page.")] = 6,
    seed: Annotated[int, typer.Option(help="Chooses them.")] = 0,
) -> None:
    """Count lengths, tool use, hops, roles, answers, duplicates and cost; write them as one self-contained page."""
    from afm.cli.progress import ProgressView
    from afm.evaluation.data_stats import write_data_report

    if out is not None and out.resolve() in {file.resolve() for file in files}:
        raise UsageError(f"{out}: input and output are the same file; choose another --out")
    spec = given_agent(agent) if agent else None
    view = ProgressView()
    found = _counted(files, spec, samples, seed, view)
    if not found.rows:
        raise DataError("holds no trajectories", path=str(files[0]))
    _told(found, view)
    if out is not None:
        funnels = _funnels(funnel or _beside(files))
        title = ", ".join(file.name for file in files[:3]) + (" and more" if len(files) > 3 else "")
        view.line(str(write_data_report(found, out, title=title, funnels=funnels, agent=spec)))


def _counted(files: Sequence[Path], spec: AgentSpec | None, samples: int, seed: int, view: Any) -> DataStats:
    from afm.evaluation.data_stats import DataStats
    from afm.trajectory import read_records

    found = DataStats(samples=samples, seed=seed)
    for file in files:
        for item in read_records(file):
            if isinstance(item, DataError):
                raise item
            found.add(item, spec)
            view.update("rows", found.rows, None)
    return found


def _told(found: DataStats, view: Any) -> None:
    from afm.evaluation.data_stats import charts
    from afm.terminal import visible

    view.line(f"{found.rows} trajectories, {found.kept} kept")
    view.line(f"  duplicates: {found.same_question} questions, {found.same_text} whole rows")
    for chart in charts(found):
        most = ", ".join(f"{bar.label} {bar.count}" for bar in chart.bars[:6])
        told = most if chart.note.startswith(("rows", "steps", "calls", "repairs")) else chart.note
        view.line(visible(f"  {chart.title.lower()}: {told}".replace("\n", " ")))
    tokens = found.prompt_tokens + found.agent_tokens
    view.line(f"  cost: {tokens} tokens, {found.cost_usd:.4f} USD, {found.tool_s:.1f} s in tools")


def _beside(files: Iterable[Path]) -> list[Path]:
    """The funnels that a filter left beside its output: ``NAME.funnel.json`` or ``funnel.json``."""
    found: list[Path] = []
    for file in files:
        for name in (f"{file.stem}.{FUNNEL_FILE}", FUNNEL_FILE):
            path = file.with_name(name)
            if path.is_file() and path not in found:
                found.append(path)
    return found


def _funnels(paths: Iterable[Path]) -> dict[str, list[FunnelStage]]:
    return {f"{path.parent.name}/{path.name}": _funnel(path) for path in paths}


def _funnel(path: Path) -> list[FunnelStage]:
    """Stages in the file's order.

    Raises:
        DataError: It is no ``{"seen": n, "stages": [{"name", "dropped"}]}``, nor ``{"seen": n, "dropped": {stage: n}}``.
    """
    from afm.evaluation.data_stats import FunnelStage

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        seen = int(data["seen"])
        rows = data["stages"] if "stages" in data else _listed(data["dropped"])
        dropped = [(str(row["name"]), int(row["dropped"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"no funnel: {type(error).__name__}; expected the funnel.json of `afm data filter`",
            path=str(path),
        ) from None
    left, stages = seen, [FunnelStage("seen", 0, seen, 1.0)]
    for name, count in dropped:
        left -= count
        stages.append(FunnelStage(name, count, left, max(0, left) / max(1, seen)))
    return stages


def _listed(dropped: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "dropped": count} for name, count in dropped.items()]
