"""``afm data``: from generated problems and a team's work to the files that training reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.negative import negative
from afm.cli.options import given_agent
from afm.errors import DataError, UsageError

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.distill import DistillSummary, Funnel
    from afm.distill.run import Progress
    from afm.trajectory.record import Record

app = typer.Typer(help="Make worlds, demonstrations and training files.", no_args_is_help=True)


class WorldKind(StrEnum):
    """The worlds that `afm data world` makes."""

    MATH = "math"
    WIKI = "wiki"


prepare = typer.Typer(help="Write the files that the training engines read.", no_args_is_help=True)
app.add_typer(prepare, name="prepare")
app.command()(negative)

Agent = Annotated[str, typer.Option(help="A shipped agent's name or a YAML.")]
Seed = Annotated[int, typer.Option(help="Fixes every random choice.")]


@app.command()
def world(
    out: Annotated[Path, typer.Option(help="Folder for the three JSONL files and their manifest.")],
    kind: Annotated[
        WorldKind, typer.Option(help="Arithmetic, or an encyclopaedia to search in.")
    ] = WorldKind.MATH,
    seed: Seed = 0,
    train: Annotated[int, typer.Option(min=1, help="Problems for demonstrations.")] = 6_000,
    rl: Annotated[int, typer.Option(min=1, help="Problems for reinforcement.")] = 4_096,
    heldout: Annotated[int, typer.Option(min=1, help="Problems for evaluation only.")] = 200,
    pages: Annotated[int, typer.Option(min=40, max=16_000_000, help="Pages of the encyclopaedia.")] = 1_000,
    hops: Annotated[str, typer.Option(help="Pages that a question of the encyclopaedia needs.")] = "1,2,3,4",
    wordings: Annotated[int, typer.Option(min=1, max=2, help="Ways in which a page words a fact.")] = 1,
) -> None:
    """Generate problems with gold answers in three disjoint sets.

    Kind wiki also writes the encyclopaedia that holds the answers, as `corpus.jsonl`.
    """
    from afm.datasets.mini_world import Split, write_world

    sizes = {Split.TRAIN: train, Split.RL: rl, Split.HELDOUT: heldout}
    if kind is WorldKind.WIKI:
        from afm.cli.progress import ProgressView
        from afm.datasets.encyclopaedia import Encyclopaedia, write_encyclopaedia

        made = Encyclopaedia(pages, seed=seed, wordings=wordings)
        paths = write_encyclopaedia(
            out, made, sizes=sizes, seed=seed, hops=_hops(hops), progress=ProgressView().update
        )
    else:
        paths = write_world(out, seed=seed, sizes=sizes)
    for split, path in paths.items():
        print(f"{path}: {sizes[split]} problems")


def _hops(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not set(numbers) <= {1, 2, 3, 4}:
        raise UsageError(f"--hops {text!r}: expected numbers from 1 to 4 with commas, for example 1,2")
    return numbers


@app.command()
def distill(
    tasks: Annotated[Path, typer.Argument(help="Problems as JSONL or parquet.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder for the event log and the trajectories.")],
    agent: Agent = "math",
    tools: Annotated[
        Path | None,
        typer.Option(help="Tools YAML; by default the sandboxed code tool.", exists=True, dir_okay=False),
    ] = None,
    seed: Seed = 0,
    parallel: Annotated[int, typer.Option(min=1, help="Problems worked on at the same time.")] = 4,
) -> None:
    """Let the scripted team solve problems with real tools and turn its work into trajectories.

    Killed or interrupted, the same command continues with the next problem.
    """
    from afm.cli.progress import ProgressView

    view = ProgressView()
    summary = asyncio.run(_distill(tasks, given_agent(agent), tools, out, seed, parallel, view.update))
    view.line(
        f"{summary.path}: {summary.kept} of {summary.tasks} trajectories kept, "
        f"{summary.tool_calls} tool calls, {summary.seconds:.0f} s"
    )
    for reason, count in sorted(summary.dropped.items()):
        print(f"  dropped: {count} {reason}")
    if not summary.kept:
        raise DataError("no trajectory was kept; the reasons stand in dropped.jsonl", path=str(out))


async def _distill(
    file: Path,
    spec: AgentSpec,
    tools_file: Path | None,
    out: Path,
    seed: int,
    parallel: int,
    progress: Progress,
) -> DistillSummary:
    from afm.cli.project import configs_folder
    from afm.datasets import read_tasks
    from afm.distill import distill as run
    from afm.distill import scripted_team
    from afm.tools import load_tools

    team = scripted_team(spec, seed)
    tools = load_tools(tools_file or configs_folder() / "tools/code_executor.yaml")
    try:
        return await run(
            list(read_tasks(file)),
            spec,
            tools,
            out,
            team=team,
            roles=team.roles,
            seed=seed,
            parallel=parallel,
            progress=progress,
        )
    finally:
        await asyncio.gather(*(tool.close() for tool in tools.values()))


@app.command("filter")
def filter_records(
    records: Annotated[Path, typer.Argument(help="Trajectory JSONL.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="JSONL of what is kept.")],
    agent: Agent = "math",
    reward: Annotated[
        Path | None, typer.Option(help="Reward YAML; by default by data source.", exists=True)
    ] = None,
    min_score: Annotated[float, typer.Option(help="Lowest score that is kept.")] = 1.0,
) -> None:
    """Keep the trajectories that follow their agent's rules and that the reward approves.

    What is dropped stands with its reason in `OUT.dropped.jsonl`.
    """
    if out.resolve() == records.resolve():
        raise UsageError(f"{out}: input and output are the same file; choose another --out")
    funnel = asyncio.run(_filter(records, out, given_agent(agent), reward, min_score))
    if not funnel.seen:
        raise DataError("holds no trajectories", path=str(records))
    print(f"{out}: {funnel.kept} of {funnel.seen} kept")
    for reason, count in sorted(funnel.dropped.items()):
        print(f"  dropped: {count} {reason}")


async def _filter(
    file: Path, out: Path, spec: AgentSpec, reward_file: Path | None, min_score: float
) -> Funnel:
    from afm.datasets.atomic import replacing
    from afm.distill import FormatFilter, Funnel, QualityFilter, run_filters
    from afm.rewards import load_reward
    from afm.trajectory import RecordWriter

    reward, funnel = load_reward(reward_file), Funnel()
    stages = (FormatFilter(spec), QualityFilter(spec, reward, min_score))
    try:
        with (
            replacing(out) as kept_path,
            replacing(out.with_name(f"{out.stem}.dropped.jsonl")) as dropped_path,
            RecordWriter(kept_path) as kept,
            RecordWriter(dropped_path) as dropped,
        ):
            async for record in run_filters(_records(file), stages):
                (kept if record.kept else dropped).write(record)
                funnel.count(record)
    finally:
        await reward.close()
    return funnel


@prepare.command("sft")
def prepare_sft(
    records: Annotated[Path, typer.Argument(help="Trajectory JSONL.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder of the data set and its dataset_info.json.")],
    agent: Agent = "math",
    name: Annotated[str, typer.Option(help="Name of the data set for LLaMA-Factory.")] = "math_agent_sft",
) -> None:
    """Write trajectories as an alpaca data set for `afm sft`."""
    from afm.datasets.prepare import write_sft

    rows = write_sft(_records(records), given_agent(agent), out, name=name, inputs=[records])
    print(f"{out / name}.json: {rows} rows")


@prepare.command("rl")
def prepare_rl(
    tasks: Annotated[Path, typer.Argument(help="Problems as JSONL or parquet.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Parquet file.")],
    agent: Agent = "math",
    ability: Annotated[str, typer.Option(help="Value of the column of that name.")] = "math",
    split: Annotated[str, typer.Option(help="Value of extra_info.split.")] = "train",
) -> None:
    """Write problems as the parquet rows that `afm rl` reads."""
    from afm.datasets import read_tasks
    from afm.datasets.prepare import write_rl

    spec = given_agent(agent)
    rows = write_rl(list(read_tasks(tasks)), spec, out, split=split, ability=ability, inputs=[tasks])
    print(f"{out}: {rows} rows")


def _records(file: Path) -> Iterator[Record]:
    """Stream a file's records; the first bad line is an error."""
    from afm.errors import DataError
    from afm.trajectory import read_records

    for item in read_records(file):
        if isinstance(item, DataError):
            raise item
        yield item
