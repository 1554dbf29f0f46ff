"""Episodes of a training that somebody will want to read: a few of each step, and those that ran out of time."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from afm.errors import DataError
from afm.runs.atomic import replacing
from afm.trajectory import append_record
from afm.trajectory.io import advantages_file
from afm.trajectory.record import Record, StopReason

EPISODES_DIR = "episodes"
"""Sampled episodes, one file a step, in the form of `afm eval`'s."""
STUCK_FILE = "stuck.jsonl"
"""Episodes that a limit on time ended, with what they were waiting for: their last call, or a generation."""

_LOG = logging.getLogger(__name__)
_OUT_OF_TIME = {StopReason.SECONDS, StopReason.TOOL_SECONDS}


def episodes_file(output_dir: Path, step: int) -> Path:
    """Where the sampled episodes of a step stand."""
    return output_dir / EPISODES_DIR / f"step_{step:06d}.jsonl"


def worth_keeping(stop: StopReason, *, sampled: bool) -> bool:
    """Whether an episode that ended so is written down."""
    return sampled or stop in _OUT_OF_TIME


def keep(output_dir: Path, step: int, record: Record, *, sampled: bool) -> None:
    """Write an episode down if it was chosen, or if it ran out of time; several processes may write at once.

    What cannot be written is told in the log: a training does not end for want of something to read.
    """
    try:
        if sampled:
            file = episodes_file(output_dir, step)
            file.parent.mkdir(exist_ok=True)
            append_record(file, record)
        if record.stop in _OUT_OF_TIME:
            append_record(output_dir / STUCK_FILE, record)
    except (DataError, OSError) as error:
        _LOG.warning("an episode of step %d was not kept: %s", step, error)


def forget_after(output_dir: Path, step: int, *, validated_again: bool = False) -> None:
    """Remove the kept episodes of steps that will be done again.

    Args:
        step: The last one that is not.
        validated_again: Its validation is (``trainer.val_before_train``).
    """
    for file in (output_dir / EPISODES_DIR).glob("step_*.jsonl"):
        if file > episodes_file(output_dir, step):
            file.unlink()
            advantages_file(file).unlink(missing_ok=True)

    def stays(origin: dict[str, Any]) -> bool:
        done = origin.get("step")
        if not isinstance(done, int):
            return True
        return done < step or (done == step and not (validated_again and origin.get("validation")))

    _thin_out(output_dir / STUCK_FILE, stays)
    _thin_out(episodes_file(output_dir, step), stays)


def _thin_out(file: Path, stays: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the episodes whose provenance ``stays``, and lines that are none; a half-written last line goes."""
    if not file.exists():
        return
    lines = file.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and stays(_provenance(line))]
    if len(kept) < len(lines):
        with replacing(file) as temporary:
            temporary.write_bytes(b"".join(kept))


def _provenance(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    origin = row.get("provenance") if isinstance(row, dict) else None
    return origin if isinstance(origin, dict) else {}
