"""``afm data distill``: a team's work on a file of tasks, as trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import given_agent
from afm.errors import BudgetSpentError, DataError, UsageError

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.distill import DistillSummary, ScriptedTeam
    from afm.distill.run import Progress
    from afm.tools import Tool


@dataclass(frozen=True, slots=True)
class _Choice:
    """What the command line says about who works with what."""

    team: Path | None
    agent: str | None
    tools: Path | None
    seed: int
    overrides: Sequence[str]


def distill(
    tasks: Annotated[Path, typer.Argument(help="Problems as JSONL or parquet.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder for the event log and the trajectories.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value for the team's file, e.g. budget.usd=5.", show_default=False),
    ] = None,
    team: Annotated[
        Path | None,
        typer.Option(
            help="YAML of a team with models, as those in configs/distill; by default scripted.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="A shipped agent's name or a YAML; by default the team's, or math.")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            help="Tools YAML; by default the team's, or the sandboxed code tool.", exists=True, dir_okay=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes every random choice of a scripted team.")] = 0,
    parallel: Annotated[int, typer.Option(min=1, help="Problems worked on at the same time.")] = 4,
) -> None:
    """Let a team solve problems with real tools and turn its work into trajectories.

    Killed or interrupted, the same command continues with the next problem. So it does after a team's budget was spent,
    once the budget is raised.
    """
    from afm.cli.progress import ProgressView

    if overrides and team is None:
        raise UsageError(f"{overrides[0]!r}: key=value is for the file of --team, which is not given")
    view = ProgressView()
    choice = _Choice(team, agent, tools, seed, tuple(overrides or ()))
    summary = asyncio.run(_distill(tasks, out, choice, parallel, view.update))
    view.line(
        f"{summary.path}: {summary.kept} of {summary.tasks} trajectories kept, "
        f"{summary.tool_calls} tool calls, {summary.seconds:.0f} s{_cost(summary)}"
    )
    for reason, count in sorted(summary.dropped.items()):
        print(f"  dropped: {count} {reason} (each one's reason: {out / 'dropped.jsonl'})")
    if summary.stopped:
        raise BudgetSpentError(f"{summary.stopped} ({summary.not_tried} of {summary.tasks} tasks not begun)")
    if not summary.kept:
        raise DataError("no trajectory was kept; the reasons stand in dropped.jsonl", path=str(out))


def _cost(summary: DistillSummary) -> str:
    spent = summary.spent
    return f", {spent.tokens} tokens, {spent.usd:.4f} USD in all" if spent.tokens else ""


async def _distill(
    file: Path, out: Path, choice: _Choice, parallel: int, progress: Progress
) -> DistillSummary:
    from afm.datasets import read_tasks
    from afm.distill import distill as run

    async with _team(choice) as (team, spec, tools):
        return await run(
            list(read_tasks(file)),
            spec,
            tools,
            out,
            team=team,
            roles=team.roles,
            seed=choice.seed,
            parallel=parallel,
            progress=progress,
        )


@asynccontextmanager
async def _team(choice: _Choice) -> AsyncIterator[tuple[ScriptedTeam, AgentSpec, dict[str, Tool]]]:
    """The team, the agent that its work is for, and the tools; closed at the end."""
    from afm.cli.project import configs_folder
    from afm.distill import scripted_team
    from afm.tools import load_tools

    if choice.team is None:
        spec = given_agent(choice.agent or "math")
        tools = load_tools(choice.tools or configs_folder() / "tools/code_executor.yaml")
        try:
            yield scripted_team(spec, choice.seed), spec, tools
        finally:
            await asyncio.gather(*(tool.close() for tool in tools.values()))
        return
    from afm.distill.model_team import load_team

    spec_given = given_agent(choice.agent) if choice.agent else None
    team = load_team(choice.team, spec_given, choice.overrides)
    tools = load_tools(choice.tools or team.settings.tools)
    try:
        yield team, team.spec, tools
    finally:
        await asyncio.gather(team.close(), *(tool.close() for tool in tools.values()))
