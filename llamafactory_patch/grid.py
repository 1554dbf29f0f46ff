"""A grid of trainings, one after another: every combination of some settings, with a table of results."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from afm.configuration import parse_yaml
from afm.errors import AfmError, ConfigError, UsageError
from llamafactory_patch import output
from llamafactory_patch.config import resolve
from llamafactory_patch.launcher import run_sft

RESULTS_FILE = "grid.csv"

_SHORT = {"lr": "learning_rate", "batch": "per_device_train_batch_size", "epochs": "num_train_epochs"}
_PLAIN = " !#$&'()*+,:;=?@[]{}^"
"""What stands in a folder's name as typed; a slash and the like are written as ``%2F``."""
_STOPPED = (130, 143)
"""Exit statuses after Ctrl-C and after a request to end: the person meant the grid, not one training."""
_MEASURED = (
    "state",
    "exit_status",
    "steps",
    "last_loss",
    "train_loss",
    "eval_loss",
    "seconds",
    "folder",
    "error",
)


@dataclass(frozen=True, slots=True)
class Point:
    """One training of a grid.

    Attributes:
        values: What it sets, as typed.
        overrides: The same as ``key=value`` pairs, with an output folder of its own.
        folder: That folder.
    """

    values: dict[str, str]
    overrides: tuple[str, ...]
    folder: Path


def grid_points(config_path: str | Path, overrides: Sequence[str], axes: Sequence[str]) -> list[Point]:
    """All combinations of ``key=value,value`` axes; ``lr``, ``batch`` and ``epochs`` may stand for their long keys.

    Every point is resolved once, so that a wrong key stops the grid before it begins.

    Raises:
        UsageError: An axis is not of that form, or names a key twice.
        ConfigError: The configuration is wrong.
    """
    parsed: dict[str, list[str]] = {}
    for axis in axes:
        name, equals, text = axis.partition("=")
        key = _SHORT.get(name.strip(), name.strip())
        values = _distinct(value.strip() for value in text.split(",") if value.strip())
        if not equals or not key or not values or key in parsed or key == "output_dir":
            raise UsageError(
                f"--grid {axis!r}: expected key=value,value with each key once, for example lr=1e-5,2e-5"
            )
        parsed[key] = values
    base = resolve(config_path, overrides).output_dir
    points = []
    for combination in product(*parsed.values()):
        chosen = dict(zip(parsed, combination, strict=True))
        folder = base / ",".join(f"{key}={quote(value, safe=_PLAIN)}" for key, value in chosen.items())
        pairs = [f"{key}={value}" for key, value in chosen.items()]
        points.append(Point(chosen, (*overrides, *pairs, f"output_dir={folder}"), folder))
        resolve(config_path, points[-1].overrides)
    return points


def _distinct(values: Iterable[str]) -> list[str]:
    """The first spelling of every value: ``1e-5`` and ``0.00001`` are one training."""
    first: dict[str, str] = {}
    for value in values:
        try:
            meant = repr(parse_yaml(value))
        except (yaml.YAMLError, ConfigError) as error:
            raise UsageError(f"--grid: {value!r} is no YAML: {error}") from None
        first.setdefault(meant, value)
    return list(first.values())


def run_grid(
    config_path: str | Path,
    overrides: Sequence[str],
    axes: Sequence[str],
    *,
    dry_run: bool = False,
    echo: bool = True,
) -> int:
    """Train every point of a grid and keep ``grid.csv`` in the configuration's ``output_dir``.

    Finished trainings are not repeated, interrupted ones continue, failed ones are tried again the next time. A
    failure is noted and the next training begins.

    Returns:
        0 when every training has finished well, 130 or 143 when it was stopped, else 1.
    """
    points = grid_points(config_path, overrides, axes)
    table = resolve(config_path, overrides).output_dir / RESULTS_FILE
    rows: list[dict[str, Any]] = []
    for number, point in enumerate(points, start=1):
        print(f"[{number}/{len(points)}] {' '.join(f'{k}={v}' for k, v in point.values.items())}", flush=True)
        status, fault = _trained(config_path, point, dry_run, echo)
        if dry_run:
            continue
        if status in _STOPPED:
            return status
        rows.append(_row(point, status, fault))
        _write(table, rows)
    if rows:
        print(f"results: {table}")
    return 0 if all(row["state"] == "finished" for row in rows) else 1


def _trained(config_path: str | Path, point: Point, dry_run: bool, echo: bool) -> tuple[int, str]:
    try:
        return run_sft(config_path, point.overrides, dry_run=dry_run, echo=echo), ""
    except (AfmError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1, str(error)


def _row(point: Point, status: int, fault: str) -> dict[str, Any]:
    row: dict[str, Any] = {**point.values, "exit_status": status, "folder": str(point.folder), "error": fault}
    row["state"] = "finished" if status == 0 else "failed"
    results = _json(point.folder / "all_results.json")
    row |= {key: results[key] for key in ("train_loss", "eval_loss") if key in results}
    row["seconds"] = _json(point.folder / output.MANIFEST_FILE).get("seconds_since_last_start")
    losses = output.logged_losses(point.folder / output.HISTORY_FILE)
    return row | ({"steps": max(losses), "last_loss": losses[max(losses)]} if losses else {})


def _json(path: Path) -> Mapping[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _write(table: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    names = [*(name for name in rows[0] if name not in _MEASURED), *_MEASURED]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    table.parent.mkdir(parents=True, exist_ok=True)
    temporary = table.with_name(f"{table.name}.{os.getpid()}.tmp")
    temporary.write_text(text.getvalue(), encoding="utf-8")
    temporary.replace(table)
