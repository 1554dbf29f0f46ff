"""``afm data filter``, ``stats``, ``negative`` and ``merge``: commands for files of trajectories."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from afm.cli.options import (
    AgentOfRowsOption,
    AgentOption,
    OnBadRows,
    RecordsArgument,
    SeedOption,
    TrustOption,
    agent_of_rows,
    agent_option,
    file_argument,
    file_option,
    lines_file,
    page_option,
    print_losses,
)
from afm.errors import DataError, UsageError, suggestion
from afm.terminal import plural, visible

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.datasets.negative_samples import NegativeKind
    from afm.datasets.negative_set import NegativeSummary
    from afm.distill.filters.base import Funnel
    from afm.distill.filters.registry import FilterPlan
    from afm.distill.filters.run import FilterSummary
    from afm.evaluation.data_stats import DataStats, FunnelStage
    from afm.terminal import ProgressView

_FilesArgument = Annotated[
    list[Path], file_argument("Trajectory JSONL, plain or .gz.", callback=lines_file(".gz"))
]
_PlainFilesArgument = Annotated[list[Path], file_argument("Trajectory JSONL.", callback=lines_file())]
_ConfigOption = Annotated[
    Path | None,
    file_option(
        "YAML of filters, for example configs/filters/mhqa.yaml [default: the agent's rules and the reward]."
    ),
]
_AgentOption = Annotated[
    str | None, typer.Option(help="Shipped agent or YAML [default: that of --config, else of the rows].")
]
_AgainstOption = Annotated[
    list[Path] | None,
    file_option(
        "Evaluation set (JSONL or parquet) whose questions are dropped from the data; may be repeated."
    ),
]
_RewardsOption = Annotated[
    Path | None, file_option("Reward YAML; not with --config [default: the scorer of the data_source].")
]
_MinScoreOption = Annotated[
    float | None, typer.Option(help="Lowest score to keep; not with --config [default: 1].")
]


def filter_files(
    files: _FilesArgument,
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Folder for kept and dropped rows.")],
    config: _ConfigOption = None,
    agent: _AgentOption = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes that filter.")] = 1,
    against: _AgainstOption = None,
    rewards: _RewardsOption = None,
    min_score: _MinScoreOption = None,
    picture: Annotated[bool, typer.Option(help="Draw the funnel as funnel.png.")] = True,
    trust: TrustOption = False,
) -> None:
    """Filter trajectories stage by stage.

    kept.jsonl and dropped.jsonl hold the rows; each dropped row has its reason. The result does not depend on
    --processes. If interrupted, run the same command again to resume.

    Example: afm data filter runs/quickstart/distill/trajectories.jsonl --agent math --output-dir runs/filtered
    """
    from afm.distill.filters.base import first_reasons
    from afm.distill.filters.run import filter_files as run
    from afm.terminal import ProgressView

    if output_dir.exists() and not output_dir.is_dir():
        raise UsageError(f"--output-dir {output_dir}: is a file; expected a folder")
    if config is not None and (rewards is not None or min_score is not None):
        raise UsageError(
            "--rewards and --min-score are settings of `quality` in the file that --config names"
        )
    plan = _plan(config, rewards, min_score).against(against or [])
    spec = agent_of_rows(agent or plan.agent, files)
    view = ProgressView()
    summary = run(
        files,
        plan,
        spec,
        output_dir,
        processes=processes,
        picture=picture,
        on_rows=lambda rows: view.update("rows", rows, None),
    )
    view.line(_headline(summary))
    _show(summary.funnel)
    file = summary.folder / "dropped.jsonl"
    lost = {name: count for name, count in summary.funnel.dropped.items() if name != "unreadable"}
    print_losses(lost, examples := first_reasons(file, lost), file)
    if others := summary.funnel.others:
        counts = ", ".join(f"{plural(count, 'row')} of {name!r}" for name, count in sorted(others.items()))
        advice = "filter the rows of each agent on their own, with its --agent"
        text = f"{counts}: another agent than {spec.name!r}, whose rules they were checked by; {advice}"
        print(f"warning: {visible(text)}", file=sys.stderr)
    for note in _notes(plan, summary):
        print(f"note: {note}")
    if not summary.funnel.kept:
        why = "no row is a trajectory record; see the note above"
        if examples:
            why = f"dropped.jsonl lists the reasons. The first one: {next(iter(examples.values()))}"
        raise DataError(f"no trajectory was kept; {why}", path=str(output_dir))


def _plan(config: Path | None, rewards: Path | None, min_score: float | None) -> FilterPlan:
    from afm.distill.filters.registry import FilterPlan, load_plan

    if config is not None:
        return load_plan(config)
    if min_score is not None and not isfinite(min_score):
        raise UsageError(f"--min-score {min_score}: expected a finite number, for example 0.5")
    quality = {"min_score": 1.0 if min_score is None else min_score, "reward": rewards}
    return FilterPlan.model_validate({"stages": [{"format": {}}, {"quality": quality}]})


def _headline(summary: FilterSummary) -> str:
    funnel = summary.funnel
    copies = f" and {plural(funnel.copies, 'copy', 'copies')}" if funnel.copies else ""
    resumed = f", {summary.resumed:,} of them by an earlier call" if summary.resumed else ""
    return f"{summary.folder}: {funnel.kept:,} of {funnel.seen:,} kept{copies}{resumed}"


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


def _notes(plan: FilterPlan, summary: FilterSummary) -> list[str]:
    """Return notes about checks that had nothing to check."""
    notes, funnel = list[str](), summary.funnel
    if any(stage.contamination is not None and not stage.contamination.tasks for stage in plan.stages):
        notes.append("contamination had nothing to compare with; name evaluation sets with --against")
    if funnel.dropped["unreadable"]:
        lines = plural(funnel.dropped["unreadable"], "line")
        with (summary.folder / "unreadable.jsonl").open(encoding="utf-8") as file:
            row = json.loads(file.readline())
        fault = DataError(row["error"], path=row["path"], line=row["line"])
        notes.append(f"{lines} could not be read as records; unreadable.jsonl lists them. The first: {fault}")
    return notes


FUNNEL_FILE = "funnel.json"


def stats(
    files: _PlainFilesArgument,
    out: Annotated[Path | None, page_option("HTML page to write [default: print only].")] = None,
    agent: AgentOfRowsOption = None,
    funnel: Annotated[
        list[Path] | None,
        file_option("funnel.json of `afm data filter`; may be repeated [default: those next to FILES]."),
    ] = None,
    samples: Annotated[int, typer.Option(min=0, max=200, help="Number of trajectories on the page.")] = 6,
    seed: Annotated[int, typer.Option(help="Seed that chooses the trajectories on the page.")] = 0,
) -> None:
    """Count lengths, tool use, hops, answers, duplicates and cost.

    --out writes them as a page, with some trajectories.
    """
    from afm.evaluation.data_stats import write_data_report
    from afm.terminal import ProgressView

    spec = agent_option(agent) if agent else None
    beside = dict.fromkeys(file.with_name(FUNNEL_FILE) for file in files)
    paths = funnel or ([] if out is None else [path for path in beside if path.is_file()])
    funnels = {f"{path.parent.name}/{path.name}": _funnel(path) for path in paths}
    view = ProgressView()
    counted = _count(files, spec, samples, seed, view)
    if not counted.rows:
        raise DataError("holds no trajectories", path=str(files[0]))
    _print_stats(counted, view)
    for name, stages in funnels.items() if funnel else ():
        left = ", ".join(f"{stage.name} {stage.left:,}" for stage in stages)
        view.line(visible(f"  rows left in {name}: {left}"))
    if out is not None:
        title = ", ".join(file.name for file in files[:3]) + (" and more" if len(files) > 3 else "")
        view.line(str(write_data_report(counted, out, title=title, funnels=funnels, agent=spec)))


def _count(files: Sequence[Path], spec: AgentSpec | None, samples: int, seed: int, view: Any) -> DataStats:
    from afm.evaluation.data_stats import DataStats
    from afm.trajectory import read_records

    counted = DataStats(samples=samples, seed=seed)
    for file in files:
        for item in read_records(file):
            if isinstance(item, DataError):
                raise item
            counted.add(item, spec)
            view.update("rows", counted.rows, None)
    return counted


def _print_stats(counted: DataStats, view: Any) -> None:
    from afm.evaluation.data_stats import charts
    from afm.evaluation.wording import dollars

    view.line(f"{plural(counted.rows, 'trajectory', 'trajectories')}, {counted.kept:,} kept")
    same = f"{plural(counted.same_question, 'question')}, {plural(counted.same_text, 'whole row')}"
    view.line(f"  duplicates: {same}")
    for chart in charts(counted):
        most = ", ".join(f"{bar.label} {bar.count}" for bar in chart.bars[:6])
        text = most if chart.note.startswith(("rows", "steps", "calls", "repairs")) else chart.note
        view.line(visible(f"  {chart.title.lower()}: {text}".replace("\n", " ")))
    tokens = counted.prompt_tokens + counted.agent_tokens
    cost = dollars(counted.cost_usd) if counted.cost_usd else "no price recorded"
    view.line(f"  cost: {plural(tokens, 'token')}, {cost}, {counted.tool_s:.1f} s in tools")


def _funnel(path: Path) -> list[FunnelStage]:
    """Read the stages that ``afm data filter`` wrote, in order."""
    from afm.evaluation.data_stats import FunnelStage

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        seen = int(data["seen"])
        dropped = [(str(row["name"]), int(row["dropped"])) for row in data["stages"]]
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        message = "holds no funnel; expected the funnel.json that `afm data filter` wrote"
        raise DataError(message, path=str(path)) from None
    left, stages = seen, [FunnelStage("seen", 0, seen, 1.0)]
    for name, count in dropped:
        left -= count
        stages.append(FunnelStage(name, count, left, max(0, left) / max(1, seen)))
    return stages


def negative(
    records: RecordsArgument,
    output_dir: Annotated[Path, typer.Option(help="Folder of the data set and its dataset_info.json.")],
    agent: AgentOfRowsOption = None,
    general: Annotated[
        Path | None,
        file_option("Questions without tools: JSONL of {question, answer} or {messages} [default: none]."),
    ] = None,
    ratio: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=NUMBER",
            help="Rows of a kind per trajectory with a tool call; may be repeated. "
            "Kinds: absent_not_needed, absent_needed, present_not_needed (0.1 each), present_needed (1).",
        ),
    ] = None,
    absent: Annotated[
        Literal["answer", "explain"],
        typer.Option(help="Reply to a request for an absent tool: answer without it, or explain only."),
    ] = "answer",
    direct: Annotated[
        Literal["agent", "plain"],
        typer.Option(help="Form of answers to general questions: the agent's tags, or plain text."),
    ] = "agent",
    on_bad_rows: Annotated[
        OnBadRows, typer.Option(help="error: stop at a bad row; drop: leave bad rows out.")
    ] = OnBadRows.ERROR,
    name: Annotated[str, typer.Option(help="Name of the data set for LLaMA-Factory.")] = "negative_agent_sft",
    seed: SeedOption = 0,
) -> None:
    """Add samples that teach when not to call a tool.

    The command mixes them with the trajectories and writes a data set for `afm sft`. There are four kinds of samples:
    tools are present or absent, and needed or not. NAME.bad_rows.jsonl lists bad rows.
    """
    from afm.datasets.negative_samples import AbsentAnswer, DirectAnswer, SampleMaker
    from afm.datasets.negative_set import NegativeSources, write_negative
    from afm.terminal import ProgressView

    view = ProgressView()
    summary = write_negative(
        NegativeSources(records, general),
        SampleMaker(agent_of_rows(agent, [records]), seed, AbsentAnswer(absent), DirectAnswer(direct)),
        output_dir,
        name=name,
        ratios=_ratios(ratio or []),
        drop_bad_rows=on_bad_rows is OnBadRows.DROP,
        on_row=lambda rows: view.rows("rows read", rows),
    )
    _show_kinds(summary, view)


def _ratios(pairs: list[str]) -> dict[NegativeKind, float]:
    from afm.datasets.negative_samples import NegativeKind
    from afm.datasets.negative_set import DEFAULT_RATIOS

    ratios = dict(DEFAULT_RATIOS)
    for pair in pairs:
        kind, _, number = pair.partition("=")
        if kind not in list(NegativeKind):
            raise UsageError(f"--ratio {pair}: {suggestion(kind, map(str, NegativeKind))}")
        try:
            ratios[NegativeKind(kind)] = value = float(number)
        except ValueError:
            value = -1.0
        if not 0 <= value < inf:
            raise UsageError(f"--ratio {pair}: expected a number from 0, for example {kind}=0.2")
    return ratios


def _show_kinds(summary: NegativeSummary, view: ProgressView) -> None:
    view.line(f"{summary.path}: {plural(sum(summary.rows.values()), 'row')}")
    for kind, wanted in summary.wanted.items():
        rows = summary.rows[kind]
        short = f", {wanted} wanted: the sources hold no more" if rows < wanted else ""
        print(f"  {kind}: {rows}{short}")
    for reason, count in sorted(summary.unused.items()):
        print(f"  not used: {count} {reason}")
    if summary.bad_rows:
        print(f"  bad rows: {summary.bad_rows} left out; listed in {summary.report}")


def merge(
    log: Annotated[Path, file_argument("Log of `afm serve gateway`.", callback=lines_file())],
    team: Annotated[
        Path,
        typer.Option(
            "--map",
            help="YAML that maps the log to an agent, like those in configs/teams.",
            exists=True,
            dir_okay=False,
        ),
    ],
    tasks: Annotated[Path, file_option("Questions of the team, as JSONL, CSV or parquet.")],
    output_dir: Annotated[
        Path, typer.Option(help="Folder of trajectories.jsonl, dropped.jsonl, manifest.json.")
    ],
    agent: AgentOption = "mhqa",
    name: Annotated[str, typer.Option(help="Name of the team [default: the folder of LOG].")] = "",
    on_bad_rows: Annotated[
        OnBadRows, typer.Option(help="error: stop at an unreadable line; drop: leave out its attempts.")
    ] = OnBadRows.ERROR,
) -> None:
    """Turn a team's recorded model calls into trajectories.

    Each attempt at a task becomes one trajectory. dropped.jsonl lists dropped attempts with their reasons,
    unreadable.jsonl lists unreadable lines.
    """
    from afm.datasets import read_tasks
    from afm.distill.reconstruct import UNREADABLE_FILE, merge_gateway_log
    from afm.distill.team_map import TeamMap
    from afm.evaluation.wording import dollars
    from afm.terminal import ProgressView

    spec = agent_option(agent)
    view = ProgressView()
    merged = merge_gateway_log(
        log,
        read_tasks(tasks),
        spec,
        TeamMap.read(team, spec),
        output_dir,
        name=name or log.parent.name,
        drop_bad_lines=on_bad_rows is OnBadRows.DROP,
        progress=view.update,
    )
    dropped = sum(merged.dropped.values())
    spent = f", {dollars(merged.cost_usd)}" if merged.cost_usd else ""
    view.line(f"{merged.path}: {merged.kept:,} of {plural(merged.kept + dropped, 'attempt')} kept{spent}")
    print_losses(merged.dropped, {}, output_dir / "dropped.jsonl")
    if merged.unreadable:
        print(f"  lines that cannot be read: {merged.unreadable}, listed in {output_dir / UNREADABLE_FILE}")
    if merged.missing:
        print(f"  tasks without a call in the log: {merged.missing}")
    if not merged.kept:
        raise DataError("no trajectory was kept; dropped.jsonl lists the reasons", path=str(output_dir))
