"""Checkpoints of a run: which one can be resumed, which have weights, and the exported Hugging Face model."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec, save_agents
from afm.agents.prompt_record import PROMPT_FILE, PromptRecord
from afm.errors import EngineError
from afm.runs.atomic import replace_text

CHECKPOINT_DIR = "checkpoints"
"""In the output folder of an `afm rl`: where its checkpoints stand."""
CHECKPOINT_REQUEST = "checkpoint_now"
"""A file of this name in a run's output folder: a checkpoint is saved at the end of the step under way."""
TRACKER_FILE = "latest_checkpointed_iteration.txt"
EXPORT_FILE = "training.json"
"""In the exported model's folder: which step it is of."""
SHARDS_FILE = "fsdp_config.json"
"""Beside the parts of a model: how many workers stored one each."""
QUEUE_DIR = "transfer_queue"
"""In a checkpoint of an asynchronous trainer: the samples that were rolled out ahead, and the questions still under way."""
_ASYNCHRONOUS = "asynchronous"
"""A file of this name in a checkpoint: an asynchronous trainer saves it, so it is not whole without its queue."""
_KINDS = ("model", "optim", "extra_state")


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
    weights = any(actor.glob("huggingface/*.safetensors")) or _has_parts(actor)
    return weights and (actor / "huggingface").is_dir() and zipfile.is_zipfile(checkpoint / "data.pt")


def _has_parts(actor: Path) -> bool:
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
    """Where a worker's ``model``, ``optim`` or ``extra_state`` stands."""
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
    stored = [found for found in ranks.values() if found]
    return bool(ranks["extra_state"]) and all(found == stored[0] for found in stored)


def exported_step(model_dir: Path) -> int | None:
    """Step of an exported model, ``None`` when there is none."""
    try:
        step: int = json.loads((model_dir / EXPORT_FILE).read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError):
        return None
    return step


def export_model(
    checkpoints: Path,
    step: int,
    model_dir: Path,
    spec: AgentSpec,
    *others: AgentSpec,
    prompts: PromptRecord | None = None,
) -> None:
    """Write a checkpoint's model in Hugging Face format, with its tokenizer, its agents and its prompts, to ``model_dir``.

    verl's ``hf_model`` is copied; without it the weights are put together from the workers' parts. They keep their data type
    (float32 unless the run chose another), which ``config.json`` then names.

    Raises:
        EngineError: The checkpoint holds no whole model, or is removed meanwhile.
    """
    actor = checkpoints / f"global_step_{step}" / "actor"
    source = actor / "huggingface"
    copied = any(source.glob("*.safetensors"))
    if not copied and not (source.is_dir() and _has_parts(actor)):
        raise EngineError(
            f"{actor}: no model weights: neither the parts of all workers ({SHARDS_FILE}, model_world_size_*) nor "
            "huggingface/*.safetensors; copy the parts of every node here, or add model to "
            "actor_rollout_ref.actor.checkpoint.save_contents"
        )
    temporary = model_dir.with_name(f"{model_dir.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(source, temporary)
        if not copied:
            from verl_ext.shards import write_model  # brings torch

            write_model(actor, temporary)
        _check_whole(temporary)
        _name_true_dtype(temporary)
        save_agents((spec, *others), temporary)
        if prompts is not None:
            prompts.save(temporary / PROMPT_FILE)
        row = {"global_step": step, "checkpoint": str(source)}
        (temporary / EXPORT_FILE).write_text(json.dumps(row) + "\n", encoding="utf-8")
        shutil.rmtree(model_dir, ignore_errors=True)
        temporary.replace(model_dir)
    except (OSError, shutil.Error) as error:
        if actor.exists():
            raise
        text = "a run keeps its newest ones only (trainer.max_actor_ckpt_to_keep)"
        raise EngineError(f"{actor}: removed while it was read; {text}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_whole(folder: Path) -> None:
    """Refuse weights of which a part is missing.

    Raises:
        EngineError: A file is absent or cut off.
    """
    index = folder / "model.safetensors.index.json"
    named = (
        set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.exists() else set()
    )
    for file in sorted({folder / name for name in named} | set(folder.glob("*.safetensors"))):
        if not file.exists():
            raise EngineError(f"{file.name} is not in the checkpoint, though its index names it")
        size, header = _header(file)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        if file.stat().st_size != 8 + size + max(ends, default=0):
            raise EngineError(f"{file.name} of the checkpoint is cut off; choose another step")


def _name_true_dtype(folder: Path) -> None:
    """Let config.json name the data type of the weights that stand beside it.

    verl builds its export model as bfloat16 and fills it with the actor's weights, which are float32: the
    file then says bfloat16, and a loader that believes it would round every weight.
    """
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    dtype = _stored_dtype(next(iter(sorted(folder.glob("*.safetensors")))))
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = dtype
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Data types of weights: safetensors' name to torch's."""


def _stored_dtype(file: Path) -> str:
    """Data type of the first tensor, from the header of a safetensors file."""
    _, header = _header(file)
    names = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    if len(names) != 1 or not names <= TORCH_DTYPES.keys():
        raise EngineError(f"{file}: expected one floating-point type, found {sorted(names)}")
    return TORCH_DTYPES[names.pop()]


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Length in bytes and content of a safetensors file's header.

    Raises:
        EngineError: It is not whole.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            header: dict[str, Any] = json.loads(stream.read(min(size, file.stat().st_size)))
        except ValueError:
            raise EngineError(f"{file.name} of the checkpoint is cut off; choose another step") from None
    return size, header
