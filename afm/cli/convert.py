"""``afm convert``: trajectories from one format to another."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from afm.cli.options import given_agent
from afm.errors import DataError, UsageError


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


class OnBadRows(StrEnum):
    """What a row that cannot be converted means."""

    ERROR = "error"
    DROP = "drop"


_ATIF_VERSIONS = tuple(f"1.{minor}" for minor in range(9))


def convert(
    file: Annotated[
        Path, typer.Argument(help="JSONL, a JSON array, or one JSON object.", exists=True, dir_okay=False)
    ],
    write_as: Annotated[FormatName, typer.Option("--to", help="What is written.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="JSONL; .json writes one JSON array.")],
    read_as: Annotated[
        FormatName | None, typer.Option("--from", help="What FILE holds; by default found by its first row.")
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            help="Agent of the trajectories: a shipped name or a YAML. By default the one they name."
        ),
    ] = None,
    tool: Annotated[
        list[str] | None,
        typer.Option(help="THEIRS=OURS: another name of a tool; THEIRS= leaves its calls out. Repeatable."),
    ] = None,
    missing_thought: Annotated[
        str, typer.Option(help="Stands where the agent needs a thought and a row has none.")
    ] = "",
    bare: Annotated[
        bool, typer.Option("--bare", help="Write only what the format itself knows, and say what is lost.")
    ] = False,
    on_bad_rows: Annotated[
        OnBadRows, typer.Option(help="With `error` nothing is written when a row is bad.")
    ] = OnBadRows.ERROR,
    atif_version: Annotated[str, typer.Option(help="What is written, 1.0 to 1.8.")] = "1.7",
) -> None:
    """Convert trajectories between formats; what a format has no place for is kept in the key `afm`, or told.

    Bad rows are told with file and line. Trajectories that break their agent's rules are converted and marked `kept: false`.
    """
    from afm.runs.atomic import replacing
    from afm.trajectory.convert import FORMATS, Context, convert_file, detected

    if out.resolve() == file.resolve():
        raise UsageError(f"{out}: input and output are the same file; choose another --out")
    if atif_version not in _ATIF_VERSIONS:
        raise UsageError(f"--atif-version {atif_version}: expected 1.0 to 1.8")
    context = Context(
        agent=given_agent(agent) if agent is not None else None,
        missing_thought=missing_thought,
        tools=_names(tool or ()),
        bare=bare,
        options={"atif_version": atif_version},
    )
    source = FORMATS[read_as.value] if read_as is not None else detected(file)
    with replacing(out) as temporary:
        done = convert_file(
            file, source, temporary, FORMATS[write_as.value], context, array=out.suffix == ".json"
        )
        _tell(done.bad)
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


def _tell(bad: Sequence[DataError]) -> None:
    for error in bad:
        print(error, file=sys.stderr)


def _names(told: Sequence[str]) -> Mapping[str, str]:
    names = {}
    for pair in told:
        theirs, equals, ours = pair.partition("=")
        if not equals or not theirs:
            raise UsageError(f"--tool {pair!r}: expected THEIRS=OURS, for example search=wiki_search")
        names[theirs] = ours
    return names
