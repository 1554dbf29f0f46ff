"""``afm validate``: check trajectories against the rules of their agent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afm.cli.convert import FormatName
from afm.cli.options import given_agent
from afm.errors import DataError, TrajectoryError

if TYPE_CHECKING:
    from afm.tools.arguments import Reader
    from afm.trajectory.convert.files import TrajectoryRow


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
    read_as: Annotated[
        FormatName | None, typer.Option("--from", help="What FILE holds; by default found by its first row.")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            help="Tools YAML whose classes read the calls. By default the shipped tools, by their names.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a row.")] = False,
) -> None:
    """Check every trajectory in FILE against the rules of its agent, and its calls by the readers of the tools.

    Every fault is printed with file, line and character. The exit status is 1 if there is any.
    """
    from afm.tools.arguments import readers_of
    from afm.trajectory.convert.files import read_rows

    if agent is not None:
        given_agent(agent)
    readers = readers_of(tools)
    rows = faulty = 0
    for row in read_rows(file, agent, read_as=read_as):
        rows += 1
        line, faults = _check(row, str(file), readers)
        faulty += bool(faults)
        if as_json:
            print(_as_json(row, line, faults))
        else:
            for fault in faults:
                print(fault)
    if not rows:
        raise DataError("holds no trajectories", path=str(file))
    if not as_json:
        print(f"{rows} trajectories: {rows - faulty} valid, {faulty} with faults")
    if faulty:
        raise typer.Exit(1)


def _check(
    row: TrajectoryRow | DataError, path: str, readers: Mapping[str, Reader]
) -> tuple[int | None, Sequence[DataError]]:
    from afm.tools.arguments import faults_of

    if isinstance(row, DataError):
        return row.line, [row]
    return row.line, [
        fault.located(path, row.line) for fault in faults_of(row.segments, row.spec, readers=readers)
    ]


def _as_json(row: TrajectoryRow | DataError, line: int | None, faults: Sequence[DataError]) -> str:
    identity = None if isinstance(row, DataError) else row.id
    listed = [_fault(fault) for fault in faults]
    return json.dumps({"id": identity, "line": line, "valid": not faults, "faults": listed})


def _fault(fault: DataError) -> dict[str, Any]:
    if isinstance(fault, TrajectoryError):
        return {"kind": fault.kind, "character": fault.character, "message": fault.message}
    return {"kind": "unreadable", "character": None, "message": fault.message}
