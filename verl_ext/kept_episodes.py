"""Episodes that a run keeps to read: a few of each step, and those that ran out of time.

Their advantages are known only once the batch is complete, so a file next to the episodes holds them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from afm.errors import DataError
from afm.runs.atomic import replace_text, replacing
from afm.trajectory import append_record
from afm.trajectory.record import Advantages, Record, StopReason, advantages_file, load_advantages

EPISODES_DIR = "episodes"
"""Folder of the sampled episodes, one file per step, in the format of `afm eval`."""
STUCK_FILE = "stuck.jsonl"
"""File of the episodes that ran out of time, with what they waited for: their last call, or a generation."""

_LOG = logging.getLogger(__name__)
_OUT_OF_TIME = {StopReason.SECONDS, StopReason.TOOL_SECONDS}


def episodes_file(output_dir: Path, step: int) -> Path:
    """Return the file of a step's sampled episodes."""
    return output_dir / EPISODES_DIR / f"step_{step:06d}.jsonl"


def worth_keeping(stop: StopReason, *, sampled: bool) -> bool:
    """Return whether an episode with this stop reason is written."""
    return sampled or stop in _OUT_OF_TIME


def keep(output_dir: Path, step: int, record: Record, *, sampled: bool) -> None:
    """Write an episode if it was sampled or ran out of time. Several processes may write at once.

    A write error is logged and does not end the run.
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
    """Remove the kept episodes of steps that will run again.

    Args:
        step: The last step that will not run again.
        validated_again: The validation of ``step`` will run again (``trainer.val_before_train``).
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
    """Keep the episodes whose provenance ``stays``, and lines without an episode. Drops a half-written last line."""
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


_STEPS_BACK = 8
"""An asynchronous trainer trains on episodes that began at most this many steps ago."""
_DIGITS = 6


def keep_advantages(queue: Any, batch: Any, output_dir: Path, step: int) -> None:
    """Write the advantages of a batch's kept episodes. A failure is logged and does not end the run."""
    try:
        kept = kept_episodes(output_dir, step)
        keys = {key: kept[name] for key in _last_outputs(batch.keys) if (name := _name(key)) in kept}
        if not keys:
            return
        fields = ["advantages", "response_mask"]
        data = queue.kv_batch_get(keys=list(keys), partition_id=batch.partition_id, select_fields=fields)
        rows = zip(keys.values(), _lists(data["advantages"]), _lists(data["response_mask"]), strict=True)
        write_advantages(output_dir, ((*where, advantages_of(values, mask)) for where, values, mask in rows))
    except (DataError, OSError, ValueError) as error:
        _LOG.warning("advantages of step %d were not kept: %s", step, error)


def kept_episodes(output_dir: Path, step: int) -> dict[str, tuple[int, str]]:
    """Return step and id of each kept episode that a batch of ``step`` may hold, by ``UID/SAMPLE``."""
    kept = {}
    for begun in range(max(0, step - _STEPS_BACK), step + 1):
        file = episodes_file(output_dir, begun)
        if file.exists():
            for line in file.read_bytes().splitlines():
                name = json.loads(line)["id"]
                kept[name.partition("/")[2]] = (begun, name)
    return kept


def advantages_of(values: Sequence[float], mask: Sequence[int]) -> Advantages:
    """Return one number if all trained tokens have the same advantage, as in a group, else one number per token."""
    rounded = [round(value, _DIGITS) for value in values]
    trained = {value for value, in_loss in zip(rounded, mask, strict=True) if in_loss}
    return trained.pop() if len(trained) == 1 else rounded


def write_advantages(output_dir: Path, rows: Iterable[tuple[int, str, Advantages]]) -> None:
    """Add advantages to the files next to their episodes. Each row holds step, id and advantages of an episode."""
    by_step: dict[int, dict[str, Advantages]] = {}
    for step, name, advantages in rows:
        by_step.setdefault(step, {})[name] = advantages
    for step, added in by_step.items():
        episodes = episodes_file(output_dir, step)
        replace_text(advantages_file(episodes), json.dumps({**load_advantages(episodes), **added}) + "\n")


def _last_outputs(keys: Iterable[str]) -> list[str]:
    """Return the key of each sample's last sequence, which is the one in its record."""
    last: dict[str, str] = {}
    for key in keys:
        sample, _, number = key.rpartition("_")
        if sample not in last or int(number) > int(last[sample].rpartition("_")[2]):
            last[sample] = key
    return list(last.values())


def _name(key: str) -> str:
    """Return ``UID/SAMPLE`` of a sample from its key in the queue, ``UID_SAMPLE_OUTPUT``."""
    uid, sample, _ = key.rsplit("_", 2)
    return f"{uid}/{sample}"


def _lists(nested: Any) -> Iterator[list[Any]]:
    return (row.tolist() for row in nested.unbind())
