"""``afm list``: the agents, recipes, tools, rewards and benchmarks that come with the project."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import typer

from afm.cli.options import configs_folder
from afm.errors import UsageError

app = typer.Typer(help="List the shipped agents, recipes, tools, rewards and benchmarks.")

Row = Mapping[str, Any]
JsonRowsOption = Annotated[bool, typer.Option("--json", help="Print one JSON array, for scripts.")]
_RECIPES = {
    "tiny/sft": ("On a laptop", "afm sft"),
    "tiny/rl": ("On a laptop", "afm rl"),
    "sft": ("On GPUs", "afm sft"),
    "rl": ("On GPUs", "afm rl"),
    "distill": ("Data", "afm data distill TASKS --output-dir DIR --team"),
    "filters": ("Data", "afm data filter ROWS --output-dir DIR --config"),
    "queries": ("Data", "afm data queries"),
    "expand": ("Data", "afm data expand"),
}
"""Folders of ``configs``, where a file of each is used, and the command that takes it."""


@app.callback(invoke_without_command=True)
def _lists(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise UsageError(
            "expected agents, recipes, tools, rewards or benchmarks; for example afm list recipes"
        )


@app.command()
def agents(as_json: JsonRowsOption = False) -> None:
    """List the shipped agents.

    Use their names with `--agent`, or as `agent:` in a YAML.
    """
    from afm.agents import load_agent, shipped_agents

    specs = map(load_agent, shipped_agents())
    rows = [
        {"name": spec.name, "tools": sorted(spec.tool_roles.values()), "description": spec.description}
        for spec in specs
    ]
    _print(rows, as_json)


@app.command()
def recipes(as_json: JsonRowsOption = False) -> None:
    """List the shipped YAML files for training and data.

    Each line is the command that uses the file.
    """
    folder = configs_folder()
    rows = [
        {"recipe": f"{command} {_shown(file)}", "description": _purpose(file)}
        for place, (_, command) in _RECIPES.items()
        for file in sorted((folder / place).glob("*.yaml"))
    ]

    def grouped(row: Row) -> tuple[str, Row]:
        command, _, file = row["recipe"].rpartition("/")
        machine, _ = _RECIPES[command.rpartition("configs/")[2]]
        return f"{machine}: {command}/FILE", {"file": file, "description": row["description"]}

    _print(rows, as_json, grouped)


@app.command()
def tools(as_json: JsonRowsOption = False) -> None:
    """List the tools in `configs/tools`.

    Use their files with `--tools`, or as `tools:` in a YAML.
    """
    _print(
        list(_tools(configs_folder() / "tools")),
        as_json,
        lambda row: (f"{row['file']}: {row['purpose']}", {key: row[key] for key in ("name", "description")}),
    )


@app.command()
def rewards(as_json: JsonRowsOption = False) -> None:
    """List the built-in scorers and the data sources that they judge.

    `by_source` in a reward YAML adds others.
    """
    from afm.rewards.registry import BY_SOURCE, MISSPELT, SCORERS

    rows = [
        {
            "scorer": scorer,
            "data_sources": [source for source, name in BY_SOURCE.items() if name == scorer],
        }
        for scorer in SCORERS
    ]
    if not as_json:
        same = {name: f"{name} (same as {meant})" for name, meant in MISSPELT.items()}
        rows = [
            row | {"data_sources": [same.get(name, name) for name in row["data_sources"]]} for row in rows
        ]
    _print(rows, as_json)


def _tools(folder: Path) -> Iterator[Mapping[str, Any]]:
    from afm.tools.registry import read_tools_file

    for file in sorted(folder.glob("*.yaml")):
        for entry in read_tools_file(file).tools:
            schema = entry.tool_schema.function
            row = {"name": schema.name, "file": _shown(file), "description": schema.description}
            yield row | {"purpose": _purpose(file)}


@app.command()
def benchmarks(as_json: JsonRowsOption = False) -> None:
    """List the benchmarks of AFM's evaluation.

    Each line has the command that runs one.
    """
    from afm.evaluation.benchmarks import BENCHMARKS

    folder = configs_folder() / "eval"
    rows = [
        {
            "name": name,
            "questions": benchmark.questions,
            "command": f"afm eval {_shown(folder / f'{name}.yaml')} model=DIR",
            "description": _purpose(folder / f"{name}.yaml"),
        }
        for name, benchmark in BENCHMARKS.items()
    ]
    heading = f"afm eval {_shown(folder / 'NAME.yaml')} model=DIR"
    _print(
        rows,
        as_json,
        lambda row: (heading, {key: row[key] for key in ("name", "questions", "description")}),
    )


def _purpose(file: Path) -> str:
    """The first clause of a YAML's header, with what is in parentheses."""
    line = file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    return str(re.findall(r"(?:\([^()]*\)|[^(.:;]|[.:;](?=\S))*", line)[0]).rstrip(" ,")


def _shown(file: Path) -> str:
    """The path to type: relative to the working folder where that is shorter."""
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def _print(
    rows: Sequence[Row], as_json: bool, grouped: Callable[[Row], tuple[str, Row]] = lambda row: ("", row)
) -> None:
    """Print JSON, a line for each row, or on a terminal tables that fit it.

    Args:
        grouped: Gives the heading of a row's table, and what the table shows of the row.
    """
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not sys.stdout.isatty():
        _print_table([_texts(row) for row in rows])
        return
    for heading, part in groupby(map(grouped, rows), key=lambda each: each[0]):
        own = [row for _, row in part]
        titles = [key.replace("_", " ").upper() for key in own[0]]
        if heading:
            print("\n".join(wrap(heading, _width(), break_long_words=False, break_on_hyphens=False)))
        _print_table([titles, *map(_texts, own)], _width())
        print()


def _width() -> int:
    return shutil.get_terminal_size().columns


def _texts(row: Row) -> list[str]:
    return [", ".join(value) or "-" if isinstance(value, list) else str(value) for value in row.values()]


def _print_table(rows: list[list[str]], width: int | None = None) -> None:
    """Print rows in columns. With ``width``, cells are wrapped so that they fit into it."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if width:
        words = [max(len(word) for cell in column for word in cell.split()) for column in columns]
        widths = [max(most, min(own, width // 3)) for most, own in zip(words, widths, strict=True)]
        widths[-1] = max(20, width - sum(widths[:-1]) - 2 * len(widths[:-1]))
    for cells in rows:
        lines = [
            wrap(cell, size, break_on_hyphens=False) if width else [cell]
            for cell, size in zip(cells, widths, strict=True)
        ]
        for line in zip_longest(*lines, fillvalue=""):
            print("  ".join(cell.ljust(size) for cell, size in zip(line, widths, strict=True)).rstrip())
