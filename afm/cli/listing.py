"""``afm list``: the agents, recipes, tools, rewards and benchmarks that come with the project."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from afm.cli.options import configs_folder

app = typer.Typer(
    help="List the shipped agents, recipes, tools, rewards and benchmarks.", no_args_is_help=True
)

JsonRowsOption = Annotated[bool, typer.Option("--json", help="Print one JSON array, for scripts.")]
_RECIPES = {
    "sft": "afm sft",
    "rl": "afm rl",
    "tiny/sft": "afm sft",
    "tiny/rl": "afm rl",
    "distill": "afm data distill TASKS --output-dir DIR --team",
    "filters": "afm data filter ROWS --output-dir DIR --config",
    "queries": "afm data queries",
    "expand": "afm data expand",
}
"""Folders of ``configs`` and the command that takes a file of each."""


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
        for place, command in _RECIPES.items()
        for file in sorted((folder / place).glob("*.yaml"))
    ]
    _print(rows, as_json)


@app.command()
def tools(as_json: JsonRowsOption = False) -> None:
    """List the tools in `configs/tools`.

    Use their files with `--tools`, or as `tools:` in a YAML.
    """
    _print(list(_tools(configs_folder() / "tools")), as_json)


@app.command()
def rewards(as_json: JsonRowsOption = False) -> None:
    """List the built-in scorers and the data sources that they judge.

    `by_source` in a reward YAML adds others.
    """
    from afm.rewards.registry import BY_SOURCE, SCORERS

    rows = [
        {
            "scorer": scorer,
            "data_sources": [source for source, name in BY_SOURCE.items() if name == scorer],
        }
        for scorer in SCORERS
    ]
    _print(rows, as_json)


def _tools(folder: Path) -> Iterator[Mapping[str, Any]]:
    from afm.tools.registry import read_tools_file

    for file in sorted(folder.glob("*.yaml")):
        for entry in read_tools_file(file).tools:
            schema = entry.tool_schema.function
            yield {"name": schema.name, "file": _shown(file), "description": schema.description}


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
    _print(rows, as_json)


def _purpose(file: Path) -> str:
    """The first clause of a YAML's header, with what is in parentheses."""
    line = file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    return str(re.findall(r"(?:\([^()]*\)|[^(.:;]|[.:;](?=\S))*", line)[0]).rstrip(" ,")


def _shown(file: Path) -> str:
    """The path to type: relative to the working folder where that is shorter."""
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def _print(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    texts = [
        [", ".join(value) or "-" if isinstance(value, list) else str(value) for value in row.values()]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for cells in texts:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
