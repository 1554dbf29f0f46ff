"""Reports: one self-contained HTML page about a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from afm.datasets.atomic import replacing
from afm.evaluation.page import render_report
from afm.evaluation.report_input import ReportInput
from afm.evaluation.run_folder import read_run, read_stages


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
    """Write the page to ``path``, replacing it once it is complete; it needs no network and no script.

    Raises:
        MissingExtraError: There are curves and matplotlib is not installed.
    """
    target = Path(path)
    html = render_report(run)
    with replacing(target) as temporary:
        # Model-written text may hold half a surrogate pair, which UTF-8 cannot carry.
        temporary.write_bytes(html.encode("utf-8", errors="replace"))
    return target


def write_run_report(run_dir: str | Path, path: str | Path) -> Path:
    """Write the page of a run folder or of one evaluation's ``out_dir``.

    Raises:
        DataError: The folder holds nothing to report, or a file in it is broken.
        MissingExtraError: There are curves and matplotlib is not installed.
    """
    return write_report(read_run(Path(run_dir)), path)


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
