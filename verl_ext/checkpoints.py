"""Checkpoints of a run: which one can be resumed, which have weights, and the step of the exported model."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

from afm.runs.atomic import replace_text

CHECKPOINT_DIR = "checkpoints"
"""In the output folder of an `afm rl`: where its checkpoints are."""
CHECKPOINT_REQUEST = "checkpoint_now"
"""A file of this name in a run's output folder: a checkpoint is saved at the end of the step under way."""
TRACKER_FILE = "latest_checkpointed_iteration.txt"
EXPORT_FILE = "training.json"
"""In the exported model's folder: which step it is of."""
SHARDS_FILE = "fsdp_config.json"
"""Next to the parts of a model: how many workers stored one each."""
LORA_FILE = "lora_train_meta.json"
"""Next to the parts of an adapter: its rank and ``lora_alpha``."""
QUEUE_DIR = "transfer_queue"
"""In a checkpoint of an asynchronous trainer: the samples that were rolled out ahead, and the questions still under way."""
_ASYNCHRONOUS = "asynchronous"
"""A file of this name in a checkpoint: an asynchronous trainer saves it, so it is not whole without its queue."""
_KINDS = ("model", "optim", "extra_state")
TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Data types of weights: safetensors' name to torch's."""


def resumable_step(folder: Path) -> int:
    """The newest complete checkpoint's step, 0 for none; repairs verl's tracker file to name it.

    verl writes the tracker last and not atomically, and with a kill at the wrong moment it is empty or
    names a folder whose content is already gone.
    """
    newest = saved_step(folder)
    tracker = folder / TRACKER_FILE
    if newest == 0:
        tracker.unlink(missing_ok=True)
    elif not tracker.exists() or tracker.read_text(encoding="ascii").strip() != str(newest):
        replace_text(tracker, str(newest))
    return newest


def saved_step(folder: Path) -> int:
    """The newest complete checkpoint's step, 0 for none; changes nothing."""
    steps = sorted((_step_of(path) for path in folder.glob("global_step_*")), reverse=True)
    return next((step for step in steps if step and _lack(folder / f"global_step_{step}") is None), 0)


def incomplete_after(folder: Path, step: int) -> dict[int, str]:
    """Checkpoints of later steps that a resumed run passes over: what each lacks, in the order of steps."""
    steps = sorted(later for later in map(_step_of, folder.glob("global_step_*")) if later > step)
    lacks = {later: _lack(folder / f"global_step_{later}") for later in steps}
    return {later: lack for later, lack in lacks.items() if lack is not None}


def begin_checkpoint(checkpoint: Path, *, asynchronous: bool) -> None:
    """Prepare a checkpoint's folder, so that it counts as whole only once everything in it is written.

    An earlier save of the same step may have left the files that are written last.
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "data.pt").unlink(missing_ok=True)
    shutil.rmtree(checkpoint / QUEUE_DIR, ignore_errors=True)
    if asynchronous:
        (checkpoint / _ASYNCHRONOUS).touch()
    else:
        (checkpoint / _ASYNCHRONOUS).unlink(missing_ok=True)


def exportable_steps(folder: Path) -> list[int]:
    """Steps whose checkpoint was saved whole and still has the weights of the model, in order; changes nothing."""
    steps = sorted(filter(None, map(_step_of, folder.glob("global_step_*"))))
    return [step for step in steps if _has_weights(folder / f"global_step_{step}")]


def _has_weights(checkpoint: Path) -> bool:
    actor = checkpoint / "actor"
    weights = any(actor.glob("huggingface/*.safetensors")) or has_parts(actor)
    return weights and (actor / "huggingface").is_dir() and zipfile.is_zipfile(checkpoint / "data.pt")


def has_parts(actor: Path) -> bool:
    """Whether the weights of all workers are in a model's checkpoint."""
    size = stored_world_size(actor) or 0
    return size > 0 and all(shard_file(actor, "model", size, rank).exists() for rank in range(size))


def _step_of(path: Path) -> int:
    number = path.name.removeprefix("global_step_")
    return int(number) if number.isdigit() else 0


def _lack(checkpoint: Path) -> str | None:
    """What a checkpoint needs to be resumed and does not have, ``None`` for a whole one."""
    # data.pt is written after every model's parts, and an archive's list of contents at its end; an old checkpoint keeps
    # it when the parts are removed. An asynchronous trainer writes its queue after that, under another name until it is
    # whole: without it the questions that were under way would never be asked again.
    models = ["actor", *(name for name in ("critic",) if (checkpoint / name).exists())]
    if incomplete := [name for name in models if not whole(checkpoint / name)]:
        return f"files of a worker in {incomplete[0]}/"
    if not zipfile.is_zipfile(checkpoint / "data.pt"):
        return "data.pt, or its end"
    if (checkpoint / _ASYNCHRONOUS).exists() and not (checkpoint / QUEUE_DIR / "metadata.json").is_file():
        return f"{QUEUE_DIR}/, which an asynchronous trainer writes last"
    return None


def shard_file(folder: Path, kind: str, world_size: int, rank: int) -> Path:
    """The file of a worker's ``model``, ``optim`` or ``extra_state``."""
    return folder / f"{kind}_world_size_{world_size}_rank_{rank}.pt"


def stored_world_size(folder: Path) -> int | None:
    """How many workers wrote the checkpoint of a model, ``None`` if it does not say."""
    try:
        size: int = json.loads((folder / SHARDS_FILE).read_text(encoding="utf-8"))["world_size"]
    except (OSError, ValueError, KeyError):
        return None
    return size


def whole(folder: Path) -> bool:
    """Whether no file of a model's checkpoint is missing for a worker that stored any of them here.

    Without a file system that all nodes share, each node has the files of its own workers. Files of another number of
    workers, whose save of the same step was interrupted, do not count.
    """
    size = stored_world_size(folder) or "*"
    ranks = {
        kind: {path.name.rpartition("_")[2] for path in folder.glob(f"{kind}_world_size_{size}_rank_*.pt")}
        for kind in _KINDS
    }
    stored = [numbers for numbers in ranks.values() if numbers]
    return bool(ranks["extra_state"]) and all(numbers == stored[0] for numbers in stored)


def exported_step(model_dir: Path) -> int | None:
    """Step of an exported model, ``None`` without a model."""
    try:
        step: int = json.loads((model_dir / EXPORT_FILE).read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError):
        return None
    return step
