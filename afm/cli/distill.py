"""``afm data distill`` and ``afm data expand``: trajectories from teachers, and larger questions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import agent_option
from afm.errors import BudgetSpentError, DataError, UsageError

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.datasets.encyclopaedia import Encyclopaedia
    from afm.distill import DistillSummary, ScriptedTeam
    from afm.distill.expand import ExpandSummary
    from afm.distill.run import Progress
    from afm.terminal import ProgressView
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
    from afm.terminal import ProgressView

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
    from afm.cli.options import configs_folder
    from afm.distill import scripted_team
    from afm.tools import load_tools

    if choice.team is None:
        spec = agent_option(choice.agent or "math")
        tools = load_tools(choice.tools or configs_folder() / "tools/code_executor.yaml")
        try:
            yield scripted_team(spec, choice.seed), spec, tools
        finally:
            await asyncio.gather(*(tool.close() for tool in tools.values()))
        return
    from afm.distill.model_team import load_team

    spec_given = agent_option(choice.agent) if choice.agent else None
    team = load_team(choice.team, spec_given, choice.overrides)
    tools = load_tools(choice.tools or team.settings.tools)
    try:
        yield team, team.spec, tools
    finally:
        await asyncio.gather(team.close(), *(tool.close() for tool in tools.values()))


class By(StrEnum):
    """The direction in which questions grow."""

    DEPTH = "depth"
    WIDTH = "width"


class SplitName(StrEnum):
    """The disjoint parts of a generated world."""

    TRAIN = "train"
    RL = "rl"
    HELDOUT = "heldout"


def expand(
    out: Annotated[Path, typer.Option(help="JSONL of questions; with --corpus or --web a folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value for the file of --team.", show_default=False)
    ] = None,
    by: Annotated[By, typer.Option(help="A chain of facts, or sub-questions that are combined.")] = By.DEPTH,
    count: Annotated[
        int, typer.Option(min=1, help="Questions; with --corpus groups, with --web topics that are tried.")
    ] = 1_000,
    world: Annotated[
        Path | None,
        typer.Option(help="Folder of `afm data world --kind wiki`.", exists=True, file_okay=False),
    ] = None,
    split: Annotated[SplitName, typer.Option(help="Part of the world.")] = SplitName.TRAIN,
    depths: Annotated[str, typer.Option(help="Facts of a chain, with commas.")] = "2,3,4",
    widths: Annotated[str, typer.Option(help="Chains of a question by width, with commas.")] = "2,3",
    corpus: Annotated[
        Path | None, typer.Option(help='JSONL {"id", "contents"}; needs --team.', exists=True, dir_okay=False)
    ] = None,
    web: Annotated[
        Path | None,
        typer.Option(
            help="Topics, one a line, to begin from on the web; needs --team.", exists=True, dir_okay=False
        ),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            help="Tools of --web; configs/tools/search.yaml by default.", exists=True, dir_okay=False
        ),
    ] = None,
    team: Annotated[
        Path | None, typer.Option(help="YAML as configs/distill/expand.yaml.", exists=True, dir_okay=False)
    ] = None,
    size: Annotated[
        int, typer.Option(min=1, max=20, help="Passages, or pages of the web, that a question needs.")
    ] = 2,
    seed: Annotated[int, typer.Option(help="Fixes every choice that no model makes.")] = 0,
    parallel: Annotated[int, typer.Option(min=1, help="Groups worked on at the same time.")] = 4,
) -> None:
    """Build questions that need several pages, each with its answer, its path and a proof that no page is needless.

    Killed, the same command goes on.
    """
    if sum(source is not None for source in (world, corpus, web)) != 1:
        raise UsageError(
            "expected either --world DIR (by rule), or --corpus FILE or --web FILE with --team YAML (by models)"
        )
    if tools is not None and web is None:
        raise UsageError("--tools is for --web")
    if world is not None:
        if team is not None or overrides:
            raise UsageError("--team and key=value are for --corpus and --web; a --world needs no model")
        _by_rule(world, out, by, SplitName(split), _numbers(depths), _numbers(widths), count, seed)
        return
    if team is None:
        raise UsageError("--corpus and --web need --team YAML, e.g. configs/distill/expand.yaml")
    asyncio.run(_by_model(corpus, web, tools, team, overrides or [], out, by, size, count, seed, parallel))


def _by_rule(
    world: Path,
    out: Path,
    by: By,
    split: SplitName,
    depths: list[int],
    widths: list[int],
    count: int,
    seed: int,
) -> None:
    from afm.datasets import write_tasks
    from afm.datasets.encyclopaedia.growth import Growth
    from afm.datasets.encyclopaedia.growth import expand as grown
    from afm.datasets.mini_world import WorldSplit
    from afm.runs.folder import write_manifest

    made = grown(
        _world(world),
        WorldSplit(split.value),
        count,
        seed=seed,
        growth=Growth(by.value),
        depths=depths,
        widths=widths,
    )
    rows = write_tasks(made, out)
    write_manifest(
        out.with_name(f"{out.stem}.manifest.json"),
        counts={"questions": rows},
        inputs=[world / "manifest.json"],
        seed=seed,
        split=split.value,
        growth=by.value,
        depths=depths,
        widths=widths if by is By.WIDTH else [1],
    )
    print(f"{out}: {rows} questions, each proved to need its pages")


def _world(folder: Path) -> Encyclopaedia:
    """The encyclopaedia that a folder was made of.

    Raises:
        DataError: Its manifest is of another kind.
    """
    from afm.datasets.encyclopaedia import Encyclopaedia

    manifest = folder / "manifest.json"
    try:
        told = json.loads(manifest.read_text(encoding="utf-8"))
        pages, seed = int(told["counts"]["pages"]), int(told["seed"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"tells no encyclopaedia: {type(error).__name__}; expected a folder of `afm data world --kind wiki`",
            path=str(manifest),
        ) from None
    return Encyclopaedia(
        pages, seed=seed, wordings=int(told.get("wordings", 1)), brief=bool(told.get("brief", False))
    )


async def _by_model(
    corpus: Path | None,
    web: Path | None,
    tools: Path | None,
    team: Path,
    overrides: list[str],
    out: Path,
    by: By,
    size: int,
    count: int,
    seed: int,
    parallel: int,
) -> None:
    from afm.datasets.encyclopaedia.growth import Growth
    from afm.distill.expand import expand_corpus, expand_web, read_expansion
    from afm.terminal import ProgressView

    view, settings, growth = ProgressView(), read_expansion(team, overrides), Growth(by.value)
    if corpus is not None:
        summary = await expand_corpus(
            corpus,
            settings,
            out,
            growth=growth,
            size=size,
            count=count,
            seed=seed,
            parallel=parallel,
            progress=view.update,
        )
    else:
        assert web is not None
        async with _opened(tools) as opened:
            summary = await expand_web(
                web,
                settings,
                opened,
                out,
                growth=growth,
                size=size,
                count=count,
                parallel=parallel,
                progress=view.update,
            )
    _tell(summary, view)


@asynccontextmanager
async def _opened(file: Path | None) -> AsyncIterator[dict[str, Tool]]:
    from afm.cli.options import configs_folder
    from afm.tools import load_tools

    tools = load_tools(file or configs_folder() / "tools/search.yaml")
    try:
        yield tools
    finally:
        await asyncio.gather(*(tool.close() for tool in tools.values()))


def _tell(summary: ExpandSummary, view: ProgressView) -> None:
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


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"{text!r}: expected numbers with commas, for example 2,3") from None
