"""``afm init``: a folder with everything that a task of your own needs."""

from __future__ import annotations

import csv
import random
import shutil
from datetime import date, timedelta
from pathlib import Path
from typing import Annotated

import typer

import afm
from afm.cli.options import afm_command
from afm.errors import UsageError

_SIZES = {"train": 4000, "rl": 512, "heldout": 100}
"""Questions for the team, for reinforcement learning and for the evaluation; each date is in only one of them."""
_FIRST_DAY, _DAYS = date(1900, 1, 1), 73_000
_COLUMNS = ("question", "answer", "data_source")


def init(
    folder: Annotated[Path, typer.Argument(help="New or empty folder, for example my_task.")],
) -> None:
    """Write a starter for a task of your own: agent, tool, reward, team, questions, recipes, README.

    Its README has the commands, from the questions to a report. Change one file at a time.

    Example: afm init my_task
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        state = "is a folder with files in it" if folder.is_dir() else "is a file"
        raise UsageError(f"{folder} {state}; expected a new or an empty folder, for example {_free(folder)}")
    source = Path(afm.__file__).parent / "starter"
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    _write_questions(folder / "questions")
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(file)
    print(f"\nnext: cd {folder} && {afm_command()} doctor tools.yaml     (README.md has all commands)")


def _free(folder: Path) -> Path:
    """A name like ``folder`` that is not taken."""
    number = 2
    while (free := folder.with_name(f"{folder.name}_{number}")).exists():
        number += 1
    return free


def _write_questions(folder: Path) -> None:
    """Write the questions as tables, the same in every starter."""
    folder.mkdir()
    days = random.Random(0).sample(range(_DAYS), sum(_SIZES.values()))
    for name, count in _SIZES.items():
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(_COLUMNS)
            for _ in range(count):
                day = _FIRST_DAY + timedelta(days.pop())
                table.writerow((f"Which weekday was {day}?", f"{day:%A}", "weekdays"))
