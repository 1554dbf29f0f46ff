"""Options and arguments that commands share, and the checks of their values."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afm.errors import ConfigError, DataError, UsageError
from afm.file_kinds import configs_folder as configs_folder
from afm.plugins import TRUST_VARIABLE

if TYPE_CHECKING:
    from afm.agents import AgentSpec, PromptSource


FOREIGN_OPTIONS = {"ignore_unknown_options": True}
"""Commands with overrides get options of other trainers as words, so that the error can say what to write."""

MAX_SEED = 2**32 - 1
"""Largest seed that NumPy accepts."""
AgentOption = Annotated[str, typer.Option(help="Shipped agent (`afm list agents`) or YAML.")]
AgentOfRowsOption = Annotated[
    str | None,
    typer.Option(
        help="Agent of the trajectories: shipped agent or YAML [default: the agent that each row names]."
    ),
]
SeedOption = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of every random choice.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
RowsJsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")]


def rows_file(value: Path | list[Path] | None) -> Path | list[Path] | None:
    """Refuse a YAML and an empty file before any work begins, where rows are expected. For ``callback=``."""
    for path in value if isinstance(value, list) else [value] if value else []:
        if path.suffix in (".yaml", ".yml"):
            from afm.configuration import describe_yaml

            raise DataError(f"expected rows (JSONL); {describe_yaml(path)}", path=str(path))
        if path.stat().st_size == 0:
            message = (
                "holds no rows: the file is empty; save your rows in it, or rerun the command that wrote it"
            )
            raise DataError(message, path=str(path))
    return value


def file_argument(text: str, callback: Callable[..., Any] | None = None) -> Any:
    """Return an argument for a file that must exist."""
    return typer.Argument(help=text, exists=True, dir_okay=False, callback=callback)


def file_option(text: str) -> Any:
    """Return an option for a file that must exist."""
    return typer.Option(help=text, exists=True, dir_okay=False)


def overrides_argument(text: str) -> Any:
    """Return the argument for the words ``KEY=VALUE`` after a YAML."""
    return typer.Argument(metavar="KEY=VALUE", help=text, show_default=False)


def _page_name(value: Path | None) -> Path | None:
    if value is not None and value.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {value}: expected the name of a page, for example {value.stem}.html")
    return value


def page_option(text: str) -> Any:
    """Return an option for a page to write. Another ending is refused, so that no data is overwritten."""
    return typer.Option(help=text, callback=_page_name)


def lines_file(*read_by_name: str, lists: bool = False) -> Callable[..., Any]:
    """Return a check that accepts only JSON lines, and files with the endings that the command itself reads.

    Args:
        lists: Whether the command also reads a JSON list of rows.
    """

    def check(value: Path | list[Path] | None) -> Path | list[Path] | None:
        from afm.trajectory.io import refuse_other_content

        rows_file(value)
        for path in value if isinstance(value, list) else [value] if value else []:
            if path.suffix not in read_by_name:
                refuse_other_content(path, lists=lists)
        return value

    return check


RecordsArgument = Annotated[Path, file_argument("Trajectory JSONL.", callback=lines_file())]
TasksArgument = Annotated[
    Path,
    file_argument(
        "Tasks as JSONL, CSV or parquet.", callback=lines_file(".csv", ".tsv", ".parquet", lists=True)
    ),
]
CallReadersOption = Annotated[
    Path | None,
    file_option("Tools YAML whose classes check the calls [default: the shipped tools, by name]."),
]


def _trust(value: bool) -> bool:
    """Store ``--trust`` in the environment, which child processes inherit."""
    if value:
        os.environ[TRUST_VARIABLE] = "1"
    return value


TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust",
        callback=_trust,
        help="Run Python files and programs of a YAML that were downloaded or belong to another user.",
    ),
]


class OnBadRows(StrEnum):
    """Treatment of bad input rows: stop, or leave the row out and list it."""

    ERROR = "error"
    DROP = "drop"


def agent_option(name: str, model: str | Path | None = None) -> AgentSpec:
    """Return the agent that ``--agent`` names. An agent of that name in the folder of ``model`` takes precedence."""
    from afm.agents import agent_of_model, load_agent

    try:
        return load_agent(name) if model is None else agent_of_model(model, name)
    except ConfigError as error:
        raise UsageError(f"--agent {name}: {error}") from None


def agent_of_rows(name: str | None, files: Sequence[Path]) -> AgentSpec:
    """Return the agent that ``--agent`` names, or else the one that the first readable record of ``files`` names."""
    from afm.agents import agent_of_model
    from afm.distill.filters.worker_pool import FilePosition, read_chunks
    from afm.trajectory.io import record_of_line

    if name is not None:
        return agent_option(name)
    named, chunk = "math", next(read_chunks(files, FilePosition()), None)
    for line in chunk.lines if chunk else ():
        with suppress(DataError):
            named = record_of_line(line).agent
            break
    try:
        return agent_of_model(files[0].parent, named)
    except ConfigError as error:
        raise UsageError(f"{files[0]}: {error}: --agent FILE") from None


def print_losses(dropped: Mapping[str, int], examples: Mapping[str, str], reasons: Path) -> None:
    """Print how many rows were dropped for each reason, with the first of them. The file ``reasons`` holds all."""
    from afm.terminal import plain

    for reason, count in sorted(dropped.items()):
        print(f"  dropped: {count:,} {plain(reason)} (reasons: {reasons})")
        if reason in examples:
            print(f"    the first: {shorten(plain(examples[reason]), 200)}")


@cache
def reward_beside(source: str, *files: Path | None) -> str:
    """Return an error that names the reward YAML near ``files`` for rows of this data source, and the command with it.

    It is empty if a built-in scorer judges the rows, or no YAML there does.
    """
    from afm.configuration import parse_yaml
    from afm.rewards.registry import BY_SOURCE, scorer_name

    with suppress(ConfigError):
        scorer_name(source, BY_SOURCE)
        return ""
    folders = [folder for file in files if file for folder in (file.parent, file.parent.parent)]
    for yaml in (yaml for folder in dict.fromkeys(folders) for yaml in sorted(folder.glob("*.yaml"))):
        with suppress(Exception):  # whatever else is in the folder
            own = parse_yaml(yaml.read_text(encoding="utf-8"))["by_source"]
            if any(fnmatchcase(source.lower(), name.lower()) for name in own):
                words = shlex.join(["afm", *sys.argv[1:], "--rewards", str(yaml)])
                return f"no built-in reward for data_source {source!r}, but {yaml} has one; run: {words}"
    return ""


def prompt_option(prompt: str) -> PromptSource:
    """Return the source of prompts that ``--prompt`` names."""
    from afm.agents import PromptSource

    try:
        return PromptSource.load(prompt)
    except ConfigError as error:
        raise UsageError(f"--prompt {prompt}: {error}") from None


def model_option(model: str) -> str:
    """Return the address that ``--model`` names, or its folder after checking that it holds a model."""
    from afm.agents import lacks_model
    from afm.findings import fetch_advice

    if re.match(r"(?!https?:)\w+://", model):
        raise UsageError(f"--model {model}: expected a model's folder, a run, or http://HOST:PORT/v1")
    if "://" not in model and (why := lacks_model(model)):
        if model.endswith(".gguf"):
            why = "a GGUF file; `afm import` makes a folder of it"
        elif Path(model).is_file():
            why = "is a file"
        expected = f"expected a model's folder, a run, or http://HOST:PORT/v1{fetch_advice(model)}"
        raise UsageError(f"--model {model}: {why}; {expected}")
    return model
