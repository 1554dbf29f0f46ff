"""``afm sandbox``: run a program the way agents' programs run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.errors import UsageError

if TYPE_CHECKING:
    from afm.sandbox import RunResult

app = typer.Typer(help="Run model-written programs in isolation.", no_args_is_help=True)


@app.callback()
def sandbox() -> None:
    """Keeps ``run`` a sub-command while it is the only one."""


@app.command()
def run(
    backend: Annotated[str, typer.Option(help="Kind of isolation.")] = "bubblewrap",
    stdin: Annotated[
        Path | None,
        typer.Option(help="File that becomes the program's standard input.", exists=True, dir_okay=False),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="The sandbox's Python; every user must be able to read it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the Python program on standard input in the sandbox, e.g. `afm sandbox run < program.py`.

    Exit status 0 when the program ended well, 1 when it failed or was stopped.
    """
    code = sys.stdin.buffer.read().decode("utf-8", "replace")
    if not code.strip():
        raise UsageError("no program on standard input; try: echo 'print(1+1)' | afm sandbox run")
    given = stdin.read_text(encoding="utf-8", errors="replace") if stdin else ""
    result = asyncio.run(_run(backend, python, code, given))
    if as_json:
        print(json.dumps(dataclasses.asdict(result), ensure_ascii=False))
    else:
        _show(result)
    raise typer.Exit(0 if result.reason == "ok" else 1)


async def _run(backend: str, python: str | None, code: str, stdin: str) -> RunResult:
    from afm.sandbox import open_sandbox

    box = open_sandbox(backend, python=python)
    try:
        return await box.run(code, stdin)
    finally:
        await box.close()


def _show(result: RunResult) -> None:
    print(result.stdout, end="")
    print(result.stderr, end="", file=sys.stderr)
    if result.reason != "ok":
        status = "" if result.exit_status is None else f", exit status {result.exit_status}"
        print(f"[{result.reason}{status}; {result.wall_s:.2f} s, {result.cpu_s:.2f} s CPU]", file=sys.stderr)
