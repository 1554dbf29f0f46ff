"""A finished evaluation's folder, for what is measured afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from afm.errors import DataError
from afm.evaluation.manifest import EPISODES_FILE
from afm.evaluation.metrics import Metrics
from afm.evaluation.run import METRICS_FILE
from afm.runs.atomic import replace_text
from afm.trajectory.io import read_records
from afm.trajectory.record import Record


def finished_metrics(out_dir: Path) -> Metrics:
    """The figures of an evaluation that ended.

    Raises:
        DataError: There are none, or they are of another version.
    """
    file = out_dir / METRICS_FILE
    if not file.is_file():
        raise DataError(
            "no finished evaluation here; expected the out_dir of an `afm eval` that ended", path=str(out_dir)
        )
    try:
        return Metrics.model_validate_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"no metrics of this version: {error}", path=str(file)) from None


def keep_metrics(out_dir: Path, metrics: Metrics) -> None:
    """Replace the figures."""
    replace_text(out_dir / METRICS_FILE, metrics.model_dump_json(indent=2) + "\n")


def records_of(out_dir: Path) -> Iterator[Record]:
    """The episodes as they stand in the file.

    Raises:
        DataError: A line is broken.
    """
    for item in read_records(out_dir / EPISODES_FILE):
        if isinstance(item, DataError):
            raise item
        yield item
