"""``afm sandbox``: run a program the way agents' programs run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from afm.cli.options import file_option
from afm.errors import UsageError
from afm.terminal import visible

if TYPE_CHECKING:
    from afm.sandbox import RunResult

Backend = Annotated[
    Literal["auto", "zygote", "bubblewrap", "nsjail"],
    typer.Option(
        metavar="KIND", help="Isolation: auto (the first that works), zygote, bubblewrap or nsjail."
    ),
]

app = typer.Typer(help="Run model-written programs in isolation.", no_args_is_help=True)


@app.command()
def run(
    backend: Backend = "auto",
    stdin: Annotated[
        Path | None, file_option("File for the program's standard input [default: empty].")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="Python of the sandbox, readable by every user [default: /usr/bin/python3]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the Python program on standard input in the sandbox.

    The exit status is 0 if the program succeeded, and 1 if it failed or was stopped.

    Example: afm sandbox run < program.py
    """
    # Python has no standard input where the shell closed it.
    code = _text(sys.stdin.buffer.read(), "standard input") if sys.stdin else ""
    if not code.strip():
        raise UsageError("no program on standard input; try: echo 'print(1+1)' | afm sandbox run")
    given = _text(stdin.read_bytes(), f"--stdin {stdin}") if stdin else ""
    result = asyncio.run(_run(backend, python, code, given))
    if as_json:
        print(json.dumps(dataclasses.asdict(result)))
    else:
        _show(result)
    raise typer.Exit(0 if result.reason == "ok" else 1)


def _text(data: bytes, name: str) -> str:
    """Decode a text. Bytes are never replaced, so that the program is the one that was given."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        text = f"{name}: byte {error.start + 1} is not UTF-8, expected text; save it as UTF-8"
        raise UsageError(text) from None


async def _run(backend: str, python: str | None, code: str, stdin: str) -> RunResult:
    from afm.sandbox import open_sandbox

    box = open_sandbox(backend, python=python)
    try:
        return await box.run(code, stdin)
    finally:
        await box.close()


@app.command()
def check(
    backend: Backend = "auto",
    only: Annotated[
        str, typer.Option(help="Run only attacks whose name contains this text [default: all].")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Attack the sandbox in every known way and print the results.

    The exit status is 1 if an attack got through. Known limits of a backend are shown but not counted.
    """
    failed = asyncio.run(_check(backend, only, as_json))
    raise typer.Exit(1 if failed else 0)


async def _check(backend: str, only: str, as_json: bool) -> int:
    from afm.sandbox import open_sandbox
    from afm.sandbox.conformance import ATTACKS, check_sandbox

    attacks = [attack for attack in ATTACKS if only in attack.name]
    if not attacks:
        raise UsageError(f"--only {only!r}: no attack has this in its name; afm sandbox check lists all")
    box = open_sandbox(backend)
    verdicts = {"stopped": 0, "known limit": 0, "GOT THROUGH": 0}
    try:
        isolation = await box.isolation()
        if not as_json:
            print(*isolation, "", f"{'it tries to':62} verdict", sep="\n")
        async for finding in check_sandbox(box, attacks):
            verdict = "stopped" if finding.passed else "known limit" if finding.known_limit else "GOT THROUGH"
            verdicts[verdict] += 1
            row = {"attack": finding.attack.name, "expected": finding.attack.expected(), "verdict": verdict}
            if as_json:
                print(
                    json.dumps(row | {"seen": finding.seen, "known_limit": finding.known_limit}), flush=True
                )
            else:
                through = f": expected {row['expected']}, saw {finding.seen}"
                why = "" if finding.passed else f": {finding.known_limit}" if finding.known_limit else through
                print(f"{row['attack']:62} {verdict}{why}", flush=True)
    finally:
        await box.close()
    if not as_json:
        print("", ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items()), sep="\n")
    return verdicts["GOT THROUGH"]


@app.command()
def install(
    packages: Annotated[
        list[str] | None,
        typer.Argument(help="Packages to install [default: numpy sympy scipy pandas]."),
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Python of the sandbox [default: /usr/bin/python3].")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder to install into [default: /var/lib/afm/sandbox for root, else ~/.local/share/afm].",
            file_okay=False,
        ),
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Install only packages that are not installed yet.")
    ] = False,
) -> None:
    """Install packages for programs in the sandbox."""
    from afm.sandbox import SandboxSettings
    from afm.sandbox.interpreter import WARM, Identity, find_interpreter
    from afm.sandbox.interpreter import install as install_packages

    found = find_interpreter(SandboxSettings(python=python or None), Identity.for_process())
    if any(not name.strip() for name in packages or []):
        raise UsageError("PACKAGES: got an empty name, expected names such as numpy or scipy==1.15")
    names = packages or [name for group in WARM for name in group]
    if missing and not (names := [name for name in names if not found.has(name)]):
        return
    print(f"installing for {found.binary}: {' '.join(names)}", file=sys.stderr)
    target = install_packages(names, found.binary, found.version, folder)
    print(f"{' '.join(names)} for {found.binary} in {target}")


def _show(result: RunResult) -> None:
    from afm.sandbox.interpreter import installation_hint

    for text, stream in ((result.stdout, sys.stdout), (result.stderr, sys.stderr)):
        print(visible(text) if stream.isatty() else text, end="", file=stream)
    for missing in result.missing:
        print(f"[the {missing} is missing]", file=sys.stderr)
    if result.reason == "error" and (hint := installation_hint(result.stderr)):
        print(f"[{hint}]", file=sys.stderr)
    if result.reason != "ok":
        status = "" if result.exit_status is None else f", exit status {result.exit_status}"
        print(f"[{result.reason}{status}; {result.wall_s:.2f} s, {result.cpu_s:.2f} s CPU]", file=sys.stderr)
