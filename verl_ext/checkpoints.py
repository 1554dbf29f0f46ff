"""Checkpoints of a run: the one to resume, those with weights, and the step of the exported model."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from afm.runs.atomic import replace_text

CHECKPOINT_DIR = "checkpoints"
"""Folder of the checkpoints in the output folder of `afm rl`."""
CHECKPOINT_REQUEST = "checkpoint_now"
"""A file of this name in a run's output folder requests a checkpoint at the end of the current step."""
TRACKER_FILE = "latest_checkpointed_iteration.txt"
EXPORT_FILE = "training.json"
"""File in the folder of an exported model that holds its step."""
SHARDS_FILE = "fsdp_config.json"
"""File next to the shards of a model that holds the number of workers that wrote them."""
LORA_FILE = "lora_train_meta.json"
"""File next to the shards of an adapter that holds its rank and what its scale depends on."""
QUEUE_DIR = "transfer_queue"
"""Folder in a checkpoint of an asynchronous trainer that holds samples rolled out ahead and unfinished questions."""
_ASYNCHRONOUS = "asynchronous"
"""File that marks a checkpoint of an asynchronous trainer, which is complete only with its queue."""
_METRICS = "step_metrics.json"
"""File in a checkpoint with the metrics of its step, for a run that is killed before the trainer logs them."""
_KINDS = ("model", "optim", "extra_state")
TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Data types of weights: names in safetensors to names in torch."""


def resumable_step(folder: Path) -> int:
    """Return the step of the newest complete checkpoint, 0 without one, and write that step to verl's tracker file.

    verl writes the tracker last and not atomically. After a kill it may be empty or name a folder without content.
    """
    newest = saved_step(folder)
    tracker = folder / TRACKER_FILE
    if newest == 0:
        tracker.unlink(missing_ok=True)
    elif not tracker.exists() or tracker.read_text(encoding="ascii").strip() != str(newest):
        replace_text(tracker, str(newest))
    return newest


def saved_step(folder: Path) -> int:
    """Return the step of the newest complete checkpoint, 0 without one. Changes no file."""
    steps = sorted((_step_of(path) for path in folder.glob("global_step_*")), reverse=True)
    return next((step for step in steps if step and _lack(folder / f"global_step_{step}") is None), 0)


def incomplete_after(folder: Path, step: int) -> dict[int, str]:
    """Return the incomplete checkpoints after ``step``, which a resumed run skips: step to what is missing."""
    steps = sorted(later for later in map(_step_of, folder.glob("global_step_*")) if later > step)
    lacks = {later: _lack(folder / f"global_step_{later}") for later in steps}
    return {later: lack for later, lack in lacks.items() if lack is not None}


def begin_checkpoint(checkpoint: Path, metrics: Mapping[str, Any], *, asynchronous: bool) -> None:
    """Prepare the folder of a checkpoint, so that it counts as complete only once all of it is written.

    Removes the files that are written last, which an earlier save of the same step may have left.

    Args:
        metrics: The trainer's metrics of the step so far. Values that are no numbers are left out.
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
    replace_text(checkpoint / _METRICS, json.dumps(numbers))
    (checkpoint / "data.pt").unlink(missing_ok=True)
    shutil.rmtree(checkpoint / QUEUE_DIR, ignore_errors=True)
    if asynchronous:
        (checkpoint / _ASYNCHRONOUS).touch()
    else:
        (checkpoint / _ASYNCHRONOUS).unlink(missing_ok=True)


def stored_metrics(checkpoint: Path) -> dict[str, float]:
    """Return the trainer's metrics of a checkpoint's step, as far as they were known when it was saved."""
    try:
        metrics: dict[str, float] = json.loads((checkpoint / _METRICS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return metrics


def exportable_steps(folder: Path) -> list[int]:
    """Return, in order, the steps whose checkpoint was saved completely and still holds the model's weights."""
    steps = sorted(filter(None, map(_step_of, folder.glob("global_step_*"))))
    return [step for step in steps if _has_weights(folder / f"global_step_{step}")]


def _has_weights(checkpoint: Path) -> bool:
    actor = checkpoint / "actor"
    weights = any(actor.glob("huggingface/*.safetensors")) or has_parts(actor)
    return weights and (actor / "huggingface").is_dir() and zipfile.is_zipfile(checkpoint / "data.pt")


def has_parts(actor: Path) -> bool:
    """Return whether a model's checkpoint holds the weights of all workers."""
    size = stored_world_size(actor) or 0
    return size > 0 and all(shard_file(actor, "model", size, rank).exists() for rank in range(size))


def _step_of(path: Path) -> int:
    number = path.name.removeprefix("global_step_")
    return int(number) if number.isdigit() else 0


def _lack(checkpoint: Path) -> str | None:
    """Return what a checkpoint lacks for a resumption, ``None`` if it is complete."""
    # verl writes data.pt after the shards of all models, and an archive has its list of contents at its end. data.pt stays
    # when verl removes the shards of an old checkpoint. An asynchronous trainer writes its queue last, under another name
    # until it is complete. Without the queue a resumed run would never ask the unfinished questions again.
    models = ["actor", *(name for name in ("critic",) if (checkpoint / name).exists())]
    if incomplete := [name for name in models if not whole(checkpoint / name)]:
        return f"files of a worker in {incomplete[0]}/"
    if not zipfile.is_zipfile(checkpoint / "data.pt"):
        return "data.pt, or its end"
    if (checkpoint / _ASYNCHRONOUS).exists() and not (checkpoint / QUEUE_DIR / "metadata.json").is_file():
        return f"{QUEUE_DIR}/, which an asynchronous trainer writes last"
    return None


def shard_file(folder: Path, kind: str, world_size: int, rank: int) -> Path:
    """Return the file of a worker's ``model``, ``optim`` or ``extra_state``."""
    return folder / f"{kind}_world_size_{world_size}_rank_{rank}.pt"


def stored_world_size(folder: Path) -> int | None:
    """Return the number of workers that wrote the checkpoint of a model, ``None`` if it is not recorded."""
    try:
        size: int = json.loads((folder / SHARDS_FILE).read_text(encoding="utf-8"))["world_size"]
    except (OSError, ValueError, KeyError):
        return None
    return size


def whole(folder: Path) -> bool:
    """Return whether each worker with any file of a model's checkpoint in ``folder`` has all of its files there.

    Without a shared file system each node has the files of its own workers. Files of an interrupted save of the same step
    by another number of workers do not count.
    """
    size = stored_world_size(folder) or "*"
    ranks = {
        kind: {path.name.rpartition("_")[2] for path in folder.glob(f"{kind}_world_size_{size}_rank_*.pt")}
        for kind in _KINDS
    }
    stored = [numbers for numbers in ranks.values() if numbers]
    return bool(ranks["extra_state"]) and all(numbers == stored[0] for numbers in stored)


def exported_step(model_dir: Path) -> int | None:
    """Return the step of an exported model, ``None`` without a model."""
    try:
        step: int = json.loads((model_dir / EXPORT_FILE).read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError):
        return None
    return step
