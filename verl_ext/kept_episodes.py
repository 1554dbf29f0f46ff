"""Episodes of a training that somebody will want to read: a few of each step, and those that ran out of time."""

from __future__ import annotations

import logging
from pathlib import Path

from afm.errors import DataError
from afm.trajectory import append_record
from afm.trajectory.advantages import advantages_file
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


def forget_after(output_dir: Path, step: int) -> None:
    """Remove the sampled episodes of steps that will be done again."""
    for file in (output_dir / EPISODES_DIR).glob("step_*.jsonl"):
        if file > episodes_file(output_dir, step):
            file.unlink()
            advantages_file(file).unlink(missing_ok=True)
