"""Advantages of the episodes that are kept: known only after the batch is complete, so they stand in a file beside them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from afm.errors import DataError
from afm.runs.atomic import replace_text
from afm.trajectory.io import Advantages, advantages_file, load_advantages
from verl_ext.kept_episodes import episodes_file

_STEPS_BACK = 8
"""An asynchronous trainer trains on episodes that began so many steps ago; on older ones it never did."""
_DIGITS = 6
_LOG = logging.getLogger(__name__)


def keep_advantages(queue: Any, batch: Any, output_dir: Path, step: int) -> None:
    """Nothing that goes wrong here ends a training."""
    try:
        kept = kept_episodes(output_dir, step)
        keys = {key: kept[name] for key in batch.keys if (name := _name(key)) in kept}
        if not keys:
            return
        fields = ["advantages", "response_mask"]
        data = queue.kv_batch_get(keys=list(keys), partition_id=batch.partition_id, select_fields=fields)
        rows = zip(keys.values(), _lists(data["advantages"]), _lists(data["response_mask"]), strict=True)
        write_advantages(output_dir, ((*where, told(values, mask)) for where, values, mask in rows))
    except (DataError, OSError, ValueError) as error:
        _LOG.warning("advantages of step %d were not kept: %s", step, error)


def kept_episodes(output_dir: Path, step: int) -> dict[str, tuple[int, str]]:
    """Step and id of each kept episode that a batch of ``step`` may hold, by its prompt's uid and its sample's number."""
    found = {}
    for begun in range(max(0, step - _STEPS_BACK), step + 1):
        file = episodes_file(output_dir, begun)
        if file.exists():
            for line in file.read_bytes().splitlines():
                name = json.loads(line)["id"]
                found[name.partition("/")[2]] = (begun, name)
    return found


def told(values: Sequence[float], mask: Sequence[int]) -> Advantages:
    """One number where every trained token has the same advantage, as in a group; else one for each token."""
    rounded = [round(value, _DIGITS) for value in values]
    trained = {value for value, one in zip(rounded, mask, strict=True) if one}
    return trained.pop() if len(trained) == 1 else rounded


def write_advantages(output_dir: Path, rows: Iterable[tuple[int, str, Advantages]]) -> None:
    """Add the advantages of episodes, each with its step and id, to the files beside their episodes."""
    by_step: dict[int, dict[str, Advantages]] = {}
    for step, name, advantages in rows:
        by_step.setdefault(step, {})[name] = advantages
    for step, added in by_step.items():
        episodes = episodes_file(output_dir, step)
        replace_text(advantages_file(episodes), json.dumps({**load_advantages(episodes), **added}) + "\n")


def _name(key: str) -> str:
    """A sample's name among the kept ones, from its key in the queue: ``UID_SAMPLE_OUTPUT``."""
    uid, sample, _ = key.rsplit("_", 2)
    return f"{uid}/{sample}"


def _lists(nested: Any) -> Iterator[list[Any]]:
    return (row.tolist() for row in nested.unbind())
