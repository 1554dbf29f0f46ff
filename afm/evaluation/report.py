"""Reports: one self-contained HTML page about a run, and the same as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afm.evaluation.comparison import read_comparison
from afm.evaluation.links import VIEW_PORT
from afm.evaluation.page import render_markdown, render_report
from afm.evaluation.report_data import report_data
from afm.evaluation.report_input import ReportInput
from afm.evaluation.run_folder import read_run, read_stages
from afm.runs.atomic import replacing


@dataclass(frozen=True, slots=True)
class StageRow:
    """The headline figures of one evaluated stage; ``None`` where nothing could be measured."""

    name: str
    pass_at_1: float | None
    pass_low: float | None
    pass_high: float | None
    format_valid: float | None
    tool_calls: float | None


def write_report(run: ReportInput, path: str | Path) -> Path:
    """Write the page to ``path``, and the same as Markdown and JSON beside it (``.md``, ``.json``); all or none.

    The page needs no network and no script.

    Raises:
        MissingExtraError: There are curves and matplotlib is not installed.
    """
    target = Path(path)
    texts = {
        target: render_report(run),
        target.with_suffix(".md"): render_markdown(run),
        target.with_suffix(".json"): json.dumps(report_data(run), indent=2) + "\n",
    }
    for file, text in texts.items():
        with replacing(file) as temporary:
            # Model-written text may hold half a surrogate pair, which UTF-8 cannot carry.
            temporary.write_bytes(text.encode("utf-8", errors="replace"))
    return target


def write_run_report(run_dir: str | Path, path: str | Path, *, view_port: int = VIEW_PORT) -> Path:
    """Write the report of a run folder or of one evaluation's ``out_dir``; see :func:`write_report`.

    Raises:
        DataError: The folder holds nothing to report, or a file in it is broken.
        MissingExtraError: There are curves and matplotlib is not installed.
    """
    return write_report(read_run(Path(run_dir), view_port=view_port), path)


def write_comparison(
    folders: Sequence[Path], path: str | Path, *, anyway: bool = False, view_port: int = VIEW_PORT
) -> Path:
    """Write the report of several evaluations, each beside the first; see :func:`write_report`.

    Raises:
        ConfigError: Settings differ that are not the model's, and not ``anyway``.
        DataError: A folder is no evaluation, or two have no question in common.
        MissingExtraError: There are curves and matplotlib is not installed.
    """
    return write_report(read_comparison(folders, anyway=anyway, view_port=view_port), path)


def stage_rows(run_dir: str | Path) -> list[StageRow]:
    """The figures of every evaluated stage of a run folder, in order.

    Raises:
        DataError: A file is broken.
    """
    rows = []
    for stage in read_stages(Path(run_dir)):
        metrics = stage.metrics
        score = metrics.pass_at_1
        rows.append(
            StageRow(
                stage.name,
                score.value if score else None,
                score.low if score else None,
                score.high if score else None,
                metrics.format_valid,
                metrics.tool_calls,
            )
        )
    return rows
