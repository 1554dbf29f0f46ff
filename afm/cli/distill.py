"""``afm data distill`` and ``afm data expand``: trajectories from teachers, and larger questions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import TasksArgument, TrustOption, agent_option
from afm.errors import BudgetSpentError, DataError, UsageError

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.distill.expand import ExpandSummary
    from afm.distill.run import DistillSummary, Progress, TeamWithRoles
    from afm.terminal import ProgressView
    from afm.tools import Tool


_RewardsOption = Annotated[
    Path | None,
    typer.Option(
        help="Reward YAML that decides which answers are kept [default: the scorer of each data source].",
        exists=True,
        dir_okay=False,
    ),
]


def distill(
    tasks: TasksArgument,
    output_dir: Annotated[Path, typer.Option(help="Folder for the event log and the trajectories.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Overrides for the team's file, e.g. budget.usd=5.",
            show_default=False,
        ),
    ] = None,
    team: Annotated[
        Path | None,
        typer.Option(
            help="YAML of a team of models (configs/distill), or of your own class (`class_name`) [default: a scripted team].",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="Shipped agent or YAML [default: the team's, else math].")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            help="Tools YAML [default: the team's, else the sandboxed code tool].",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of a scripted team.")] = 0,
    rewards: _RewardsOption = None,
    max_parallel: Annotated[int, typer.Option(min=1, help="Problems solved at the same time.")] = 4,
    trust: TrustOption = False,
) -> None:
    """Let a team solve problems with real tools and turn its work into trajectories.

    If interrupted, run the same command again to resume. If the team's budget is spent, raise it and run the command again.

    Example: afm data distill tasks.jsonl --team configs/distill/mhqa.yaml --output-dir data/mhqa budget.usd=5
    """
    from afm.terminal import ProgressView

    if overrides and team is None:
        raise UsageError(f"{overrides[0]!r}: overrides change the file of --team; give one: --team FILE")
    view = ProgressView()
    opened = _team(team, agent, tools, seed, overrides or ())
    summary = asyncio.run(_distill(tasks, output_dir, opened, seed, max_parallel, rewards, view.update))
    view.line(
        f"{summary.path}: {summary.kept} of {summary.tasks} trajectories kept, "
        f"{summary.tool_calls} tool calls, {summary.seconds:.0f} s{_cost(summary)}"
    )
    _explain_losses(summary, output_dir)


def _explain_losses(summary: DistillSummary, output_dir: Path) -> None:
    """Print why rows were dropped; end with an error where the budget is spent or no row is left."""
    for reason, count in sorted(summary.dropped.items()):
        print(f"  dropped: {count} {reason} (each one's reason: {output_dir / 'dropped.jsonl'})")
    if summary.team.stopped:
        raise BudgetSpentError(
            f"{summary.team.stopped} ({summary.not_tried} of {summary.tasks} tasks not begun)"
        )
    if not summary.kept:
        message = f"no trajectory was kept; dropped.jsonl lists the reasons. The first one: {summary.example}"
        raise DataError(message, path=str(output_dir))


def _cost(summary: DistillSummary) -> str:
    spent = summary.spent
    return f", {spent.tokens} tokens, {spent.usd:.4f} USD in all" if spent.tokens else ""


_Opened = tuple["TeamWithRoles", "AgentSpec", dict[str, "Tool"]]


async def _distill(
    file: Path,
    output_dir: Path,
    opened: AbstractAsyncContextManager[_Opened],
    seed: int,
    max_parallel: int,
    rewards: Path | None,
    progress: Progress,
) -> DistillSummary:
    from afm.datasets import read_tasks
    from afm.distill.run import distill as run

    tasks = list(read_tasks(file))
    if not tasks:
        raise DataError("holds no questions, only the names of its columns", path=str(file))
    async with opened as (team, spec, tools):
        return await run(
            tasks,
            spec,
            tools,
            output_dir,
            team=team,
            seed=seed,
            max_parallel=max_parallel,
            rewards=rewards,
            progress=progress,
        )


@asynccontextmanager
async def _team(
    file: Path | None, agent: str | None, tools_file: Path | None, seed: int, overrides: Sequence[str]
) -> AsyncIterator[_Opened]:
    """The team, the agent that its work is for, and the tools; closed at the end."""
    from afm.cli.options import configs_folder
    from afm.distill.scripted_teams import scripted_team
    from afm.distill.team_player import open_team
    from afm.tools import load_tools

    async with AsyncExitStack() as stack:
        team: TeamWithRoles
        if file is None:
            spec = agent_option(agent or "math")
            team = scripted_team(spec, seed)
            tools_file = tools_file or configs_folder() / "tools/code_executor.yaml"
        else:
            team = members = open_team(file, agent_option(agent) if agent else None, overrides, seed)
            stack.push_async_callback(members.close)
            spec = members.spec
            tools_file = tools_file or members.settings.tools
        tools = load_tools(tools_file)
        for tool in tools.values():
            stack.push_async_callback(tool.close)
        yield team, spec, tools


def expand(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML of the expansion, for example configs/expand/world.yaml.", exists=True, dir_okay=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="For example output_dir=DIR growth=width count=100."),
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Build questions that need several pages, each with its answer and a proof that no page can be left out.

    Questions come from a generated world by rules, or from models that read a corpus or the web. The command writes
    tasks.jsonl and manifest.json into output_dir. If interrupted, run the same command again to resume.
    """
    from afm.distill.expand import WorldExpansion, expand_world, read_expansion
    from afm.distill.expand import expand as expand_by_models
    from afm.terminal import ProgressView

    settings = read_expansion(config, overrides or [])
    if isinstance(settings, WorldExpansion):
        print(f"{expand_world(settings)}: {settings.count} questions, each proved to need its pages")
        return
    view = ProgressView()
    _show_expansion(asyncio.run(expand_by_models(settings, view.update)), view)


def _show_expansion(summary: ExpandSummary, view: ProgressView) -> None:
    spent, groups = summary.spent, summary.groups
    view.line(
        f"{summary.path}: {summary.kept} questions of {groups} groups, {spent.tokens} tokens, {spent.usd:.4f} USD in all"
    )
    for reason, number in sorted(summary.rejected.items()):
        print(f"  rejected: {number} {reason}")
    if summary.failed:
        print(f"  failed: {summary.failed}; the same command tries them again")
    if summary.stopped:
        raise BudgetSpentError(summary.stopped)
