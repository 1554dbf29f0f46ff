"""``afm cassette``: what a cassette of tool calls holds, and how old it is."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

_DAY_S = 86_400.0


def cassette(
    file: Annotated[Path, typer.Argument(help="Cassette of tool calls.", exists=True, dir_okay=False)],
    max_age_days: Annotated[float, typer.Option(min=0.0, help="Calls older than this are stale.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the recorded calls of FILE by tool: how many, how old, and under how many versions of the tool."""
    from afm.tools.cassette import Cassette, staleness

    report = staleness(Cassette(file), max_age_days * _DAY_S)
    if as_json:
        print(json.dumps({tool: dataclasses.asdict(found) for tool, found in report.items()}))
        return
    if not report:
        print(f"{file}: no calls")
    for tool, found in report.items():
        print(
            f"{tool}: {found.calls} calls from {_date(found.oldest)} to {_date(found.newest)}, "
            f"{found.outdated} older than {max_age_days:g} days, versions of the tool: {len(found.versions)}"
        )


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")
