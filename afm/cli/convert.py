"""``afm convert``, ``afm validate`` and ``afm data merge``: formats of trajectories, their rules, and those of a recorded team."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import AgentOption, CallReadersOption, OnBadRows, RowsJsonOption, agent_option
from afm.errors import DataError, TrajectoryError, UsageError

if TYPE_CHECKING:
    from afm.tools.registry import Reader
    from afm.trajectory.convert.files import TrajectoryRow


class FormatName(StrEnum):
    """Formats; a test holds them against :data:`afm.trajectory.convert.FORMATS`."""

    COA = "coa"
    ALPACA = "alpaca"
    SHAREGPT = "sharegpt"
    OPENAI = "openai"
    MESSAGES = "messages"
    REACT = "react"
    AGENT_FLAN = "agent_flan"
    SMOLAGENTS = "smolagents"
    ATIF = "atif"
    OPENAI_AGENTS = "openai_agents"


_FileArgument = Annotated[
    Path, typer.Argument(help="JSONL, a JSON array, or one JSON object.", exists=True, dir_okay=False)
]
ReadAsOption = Annotated[
    FormatName | None, typer.Option("--from", help="What FILE holds; by default found by its first row.")
]
_AgentOption = Annotated[
    str | None,
    typer.Option(help="Agent of the trajectories: a shipped name or a YAML. By default the one they name."),
]
_ToolOption = Annotated[
    list[str] | None,
    typer.Option(help="THEIRS=OURS: another name of a tool; THEIRS= leaves its calls out. Repeatable."),
]
_MissingThoughtOption = Annotated[
    str, typer.Option(help="Stands where the agent needs a thought and a row has none.")
]
_BareOption = Annotated[
    bool, typer.Option("--bare", help="Write only what the format itself knows, and say what is lost.")
]
_OnBadRowsOption = Annotated[
    OnBadRows, typer.Option(help="With `error` nothing is written when a row is bad.")
]


def convert(
    file: _FileArgument,
    write_as: Annotated[FormatName, typer.Option("--to", help="What is written.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="JSONL; .json writes one JSON array.")],
    read_as: ReadAsOption = None,
    agent: _AgentOption = None,
    tool: _ToolOption = None,
    missing_thought: _MissingThoughtOption = "",
    bare: _BareOption = False,
    on_bad_rows: _OnBadRowsOption = OnBadRows.ERROR,
    atif_version: Annotated[str, typer.Option(help="What is written, 1.0 to 1.8.")] = "1.7",
) -> None:
    """Convert trajectories between formats; what a format has no place for is kept in the key `afm`, or told.

    Bad rows are told with file and line. Trajectories that break their agent's rules are converted and marked `kept: false`.
    """
    from afm.runs.atomic import replacing
    from afm.trajectory.convert import FORMATS, Context, convert_file, detected

    if out.resolve() == file.resolve():
        raise UsageError(f"{out}: input and output are the same file; choose another --out")
    if atif_version not in {f"1.{minor}" for minor in range(9)}:
        raise UsageError(f"--atif-version {atif_version}: expected 1.0 to 1.8")
    context = Context(
        agent=agent_option(agent) if agent is not None else None,
        missing_thought=missing_thought,
        tools=_names(tool or ()),
        bare=bare,
        atif_version=atif_version,
    )
    source = FORMATS[read_as.value] if read_as is not None else detected(file)
    with replacing(out) as temporary:
        done = convert_file(
            file, source, temporary, FORMATS[write_as.value], context, array=out.suffix == ".json"
        )
        for error in done.bad:
            print(error, file=sys.stderr)
        if done.bad and on_bad_rows is OnBadRows.ERROR:
            raise DataError(
                f"{len(done.bad)} rows cannot be converted, so nothing was written", path=str(file)
            )
        if not done.rows:
            raise DataError("holds no rows that can be converted", path=str(file))
    for what, rows in done.lost.items():
        print(f"warning: lost in {rows} rows: {what}", file=sys.stderr)
    refused = f", {done.refused} of them break their agent's rules (kept: false)" if done.refused else ""
    print(f"{out}: {done.rows} rows, {source.name} to {write_as.value}{refused}")


def _names(pairs: Sequence[str]) -> Mapping[str, str]:
    names = {}
    for pair in pairs:
        theirs, equals, ours = pair.partition("=")
        if not equals or not theirs:
            raise UsageError(f"--tool {pair!r}: expected THEIRS=OURS, for example search=wiki_search")
        names[theirs] = ours
    return names


def validate(
    file: Annotated[
        Path,
        typer.Argument(
            help="Trajectory JSONL, alpaca rows, or any format of `afm convert`.", exists=True, dir_okay=False
        ),
    ],
    agent: Annotated[
        str | None,
        typer.Option(
            help="Agent to check against: a shipped name or a YAML. Default: the one each row names."
        ),
    ] = None,
    read_as: ReadAsOption = None,
    tools: CallReadersOption = None,
    as_json: RowsJsonOption = False,
) -> None:
    """Check every trajectory in FILE against the rules of its agent, and its calls by the readers of the tools.

    Every fault is printed with file, line and character. The exit status is 1 if there is any.
    """
    from afm.tools.registry import readers_of
    from afm.trajectory.convert.files import read_rows

    if agent is not None:
        agent_option(agent)
    readers = readers_of(tools)
    rows = faulty = 0
    for row in read_rows(file, agent, read_as=read_as):
        rows += 1
        faults = _faults(row, str(file), readers)
        faulty += bool(faults)
        if as_json:
            print(_as_json(row, faults))
        else:
            for fault in faults:
                print(fault)
    if not rows:
        raise DataError("holds no trajectories", path=str(file))
    if not as_json:
        print(f"{rows} trajectories: {rows - faulty} valid, {faulty} with faults")
    if faulty:
        raise typer.Exit(1)


def _faults(row: TrajectoryRow | DataError, path: str, readers: Mapping[str, Reader]) -> Sequence[DataError]:
    from afm.tools.registry import faults_of

    if isinstance(row, DataError):
        return [row]
    faults = faults_of(row.segments, row.spec, readers=readers)
    return [fault.located(path, row.line) for fault in faults]


def _as_json(row: TrajectoryRow | DataError, faults: Sequence[DataError]) -> str:
    listed = [
        {
            "kind": fault.kind if isinstance(fault, TrajectoryError) else "unreadable",
            "character": fault.character if isinstance(fault, TrajectoryError) else None,
            "message": fault.message,
        }
        for fault in faults
    ]
    identity = None if isinstance(row, DataError) else row.id
    return json.dumps({"id": identity, "line": row.line, "valid": not faults, "faults": listed})


def merge(
    log: Annotated[Path, typer.Argument(help="Log of `afm serve gateway`.", exists=True, dir_okay=False)],
    team: Annotated[
        Path, typer.Option("--map", help="YAML as those in configs/teams.", exists=True, dir_okay=False)
    ],
    tasks: Annotated[Path, typer.Option(help="The tasks, as JSONL or parquet.", exists=True, dir_okay=False)],
    output_dir: Annotated[
        Path, typer.Option(help="Folder of trajectories.jsonl, dropped.jsonl, manifest.json.")
    ],
    agent: AgentOption = "mhqa",
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
    from afm.datasets import read_tasks
    from afm.distill.gateway_log import UNREADABLE_FILE, merge_gateway_log
    from afm.distill.team_map import TeamMap
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
    spent = f", {merged.cost_usd:.2f} USD" if merged.cost_usd else ""
    view.line(f"{merged.path}: {merged.kept} of {merged.kept + dropped} attempts kept{spent}")
    for reason, count in sorted(merged.dropped.items()):
        print(f"  dropped: {count} {reason}")
    if merged.unreadable:
        print(f"  lines that cannot be read: {merged.unreadable}, listed in {output_dir / UNREADABLE_FILE}")
    if merged.missing:
        print(f"  tasks without a call in the log: {merged.missing}")
    if not merged.kept:
        raise DataError("no trajectory was kept; the reasons stand in dropped.jsonl", path=str(output_dir))
