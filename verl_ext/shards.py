"""Loading of FSDP2 checkpoints of verl by any number of workers.

Every worker stores its own part of each tensor (``model_world_size_W_rank_R.pt``, ``optim_...``, ``extra_state_...``).
verl 0.9.1 looks for the files of its current number of workers. Here a worker reads its new part from all stored parts.
``torch.distributed.checkpoint`` finds the overlaps. The files are mapped into memory, so only the overlaps are read.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future

from afm.errors import EngineError
from afm.plugins import distrust, require_trust
from verl_ext.checkpoints import LORA_FILE, SHARDS_FILE, TORCH_DTYPES, shard_file, stored_world_size
from verl_ext.lora import matrix_of, parts_of_matrix, scale_of, served_name, with_adapter


class ShardReader(checkpoint.StorageReader):
    """Reads all workers' parts of some tensors for ``torch.distributed.checkpoint.load``.

    Args:
        parts: One mapping of names to tensors per worker that stored them, in the order of ranks.
    """

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        self._sizes: dict[str, TensorStorageMetadata] = {}
        self._pieces: dict[tuple[str, torch.Size], torch.Tensor] = {}
        for rank, part in enumerate(parts):
            for name, tensor in part.items():
                self._add(name, tensor, rank)

    def _add(self, name: str, tensor: Any, rank: int) -> None:
        local, offset = piece(name, tensor, rank)
        if (name, offset) in self._pieces or local.numel() == 0:
            return  # a copy of another worker's part, or an empty part
        self._pieces[name, offset] = local
        properties = TensorProperties(dtype=local.dtype)
        entry = self._sizes.setdefault(name, TensorStorageMetadata(properties, tensor.size(), []))
        entry.chunks.append(ChunkStorageMetadata(offset, local.size()))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return names, sizes and offsets of the parts."""
        return Metadata(dict(self._sizes))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the blocks that ``plan`` requests to their targets."""
        for item in plan.items:
            source = self._pieces[item.storage_index.fqn, torch.Size(item.storage_index.offset or ())]
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: the reader keeps no state between two loads."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the reader needs no setup."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return false: the reader gets the parts themselves, not an id."""
        return False


def piece(name: str, tensor: Any, rank: int) -> tuple[torch.Tensor, torch.Size]:
    """Return a worker's part of a tensor, and its offset in the whole tensor.

    Raises:
        EngineError: The tensor does not have FSDP2's layout.
    """
    if not isinstance(tensor, DTensor):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise EngineError(
                f"{name} is stored as {type(tensor).__name__}; only checkpoints of FSDP2 can be merged or read by "
                "another number of workers (set actor_rollout_ref.actor.strategy=fsdp2, or also save hf_model)"
            )
        return tensor, torch.Size([0] * tensor.dim())
    offset = [0] * tensor.dim()
    [coordinate] = (tensor.device_mesh.mesh == rank).nonzero().tolist()
    for placement, size, position in zip(
        tensor.placements, tensor.device_mesh.shape, coordinate, strict=True
    ):
        if placement.is_replicate():
            continue
        if type(placement) is not Shard or offset[placement.dim]:
            raise EngineError(
                f"{name} has placements {tensor.placements}; expected a split along one dimension"
            )
        # Like torch.chunk: equal parts, of which the last ones are smaller or empty.
        length = -(-tensor.size(placement.dim) // size)
        offset[placement.dim] = min(length * position, tensor.size(placement.dim))
    return tensor._local_tensor, torch.Size(offset)


def read_shards(folder: Path, kind: str) -> list[Any]:
    """Return what every worker stored, in the order of ranks. Tensors are mapped into memory, not read.

    Raises:
        EngineError: A worker's file is missing.
        ConfigError: The checkpoint needs ``--trust``, because it is a pickle that can run code.
    """
    require_trust(f"{folder} holds pickles, which can run code", distrust(folder))
    size = stored_world_size(folder) or 0
    files = [shard_file(folder, kind, size, rank) for rank in range(size)]
    missing = [str(file) for file in files if not file.exists()]
    if missing or not files:
        raise EngineError(
            f"{folder}: written by {size} workers, but {', '.join(missing) or SHARDS_FILE} is missing; copy all of its files here, "
            "on every node, or continue from another checkpoint"
        )
    with _without_warnings_of_meshes():
        return [torch.load(file, map_location="cpu", weights_only=False, mmap=True) for file in files]


@contextmanager
def _without_warnings_of_meshes() -> Iterator[None]:
    """Silence torch's warnings that the workers' process group is missing, which reading does not need."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _fill(targets: dict[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
    with warnings.catch_warnings():
        # Every worker plans for itself, which torch takes for a single process.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        checkpoint.load(targets, storage_reader=ShardReader(parts), no_dist=True)


def load_model(module: Any, parts: Sequence[Mapping[str, Any]], *, partly: bool = False) -> None:
    """Load weights that another number of workers stored into a sharded module.

    Args:
        partly: The checkpoint has only some of the weights (adapters). The other weights do not change.
    """
    weights = {name: value for name, value in module.state_dict().items() if not partly or name in parts[0]}
    _fill(weights, parts)
    module.load_state_dict(weights, strict=not partly)


FILE_BYTES = 2 * 10**9
"""Most bytes of weights per file, unless one tensor is larger. This much of the workers' parts is mapped at a time."""


def write_model(folder: Path, target: Path, file_bytes: int = FILE_BYTES, base: Path | None = None) -> None:
    """Merge all workers' parts of a model into safetensors files in ``target``, next to its ``config.json``.

    Adapters are merged into their matrices. Memory holds the largest tensor, and mapped parts of one file.

    Args:
        base: Folder of the model that a LoRA run began with, for checkpoints that hold only adapters.

    Raises:
        EngineError: A part is missing or was not stored by FSDP2, or the checkpoint needs ``base``.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    stored = StoredModel(folder, base)
    layout = dict(stored.layout)
    if json.loads((target / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings"):
        layout.pop("lm_head.weight", None)  # a loader ties it to the embedding
    files = split_torch_state_dict_into_shards(layout, max_shard_size=file_bytes)
    for file, names in files.filename_to_tensors.items():
        stored.map()  # again for each file, because pages that were read stay in memory
        _write_safetensors(target / file, {name: layout[name] for name in names}, stored.read)
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_adapter(folder: Path, target: Path, base: Path | None) -> None:
    """Write a checkpoint's adapter as peft does, with the path of its model.

    Raises:
        EngineError: The checkpoint holds no adapter, or its model is unknown.
    """
    from safetensors.torch import save_file

    if base is None:
        raise EngineError(f"{folder}: the model of its adapter is unknown (no rl_config.yaml)")
    stored = StoredModel(folder, base)
    if not stored.adapter:
        raise EngineError(f"{folder}: holds no adapter (actor_rollout_ref.model.lora_rank was 0)")
    save_file(stored.adapter, target / "adapter_model.safetensors", {"format": "pt"})
    config = stored.lora | {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "target_modules": sorted({matrix_of(name).split(".")[-2] for name in stored.adapter}),
        "inference_mode": True,
    }
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class StoredModel:
    """The weights of a checkpoint by the model's own names, with adapters merged in, read one at a time.

    Args:
        folder: Folder of all workers' parts.
        base: See :func:`write_model`.
    """

    def __init__(self, folder: Path, base: Path | None = None) -> None:
        self._folder = folder
        self.map()
        names = self._parts[0]
        self._stored = {served_name(name)[0]: name for name in names if not served_name(name)[1]}
        self.adapter = {served_name(name)[0]: self._whole(name) for name in names if served_name(name)[1]}
        """The parts of the adapter by peft's names, empty without an adapter."""
        self.lora: dict[str, Any] = {}
        """The part of peft's configuration that verl stores: rank, ``lora_alpha`` and what else its scale depends on."""
        self._files: dict[str, Path] = {}
        if self.adapter:
            self.lora = json.loads((folder / LORA_FILE).read_text(encoding="utf-8"))
        if self.adapter and not self._stored:
            self._files = _tensors_of(folder, base)
        self.layout = {name: self._like(name) for name in self._stored or self._files}
        """Sizes and data types of the tensors, without values."""

    def map(self) -> None:
        """Map the workers' parts into memory."""
        self._parts = read_shards(self._folder, "model")

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor, with its adapter merged in."""
        matrix = self._whole(self._stored[name]) if self._stored else self._of_base(name)
        down, up = parts_of_matrix(name)
        if down not in self.adapter:
            return matrix
        return with_adapter(matrix, self.adapter[down], self.adapter[up], scale_of(self.lora))

    def _whole(self, name: str) -> torch.Tensor:
        like = self._parts[0][name]
        tensor = torch.empty(like.size(), dtype=like.dtype)
        _fill({name: tensor}, [{name: part[name]} if name in part else {} for part in self._parts])
        return tensor

    def _of_base(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], "pt") as tensors:
            # In the trainer's data type, which is also that of its adapter.
            return tensors.get_tensor(name).to(next(iter(self.adapter.values())).dtype)

    def _like(self, name: str) -> torch.Tensor:
        if self._stored:
            value = self._parts[0][self._stored[name]]
            return torch.empty(value.size(), dtype=value.dtype, device="meta")
        with safe_open(self._files[name], "pt") as tensors:
            size = tensors.get_slice(name).get_shape()
        return torch.empty(size, dtype=next(iter(self.adapter.values())).dtype, device="meta")


def _tensors_of(folder: Path, base: Path | None) -> dict[str, Path]:
    """Return the file of each weight of an adapter's model.

    Raises:
        EngineError: The folder of the model holds no weights.
    """
    files = sorted(base.glob("*.safetensors")) if base else []
    if not files:
        raise EngineError(
            f"{folder}: holds only an adapter, and {base or 'the unknown folder of its model'} has no *.safetensors; "
            "restore the model with which the run began there"
        )
    names: dict[str, Path] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            names |= dict.fromkeys(tensors.keys(), file)
    return names


_STORED_AS = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def _write_safetensors(
    file: Path, layout: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor]
) -> None:
    """Write tensors one after the other, so that memory holds one at a time. The library's function needs all at once.

    The format is the length of the header in 8 bytes, the header as JSON, and the tensors' bytes
    (https://github.com/huggingface/safetensors#format).

    Args:
        layout: Sizes and data types of the tensors, by name.
        read: Returns a tensor by name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, like in layout.items():
        begin, end = end, end + like.nbytes
        kind = str(like.dtype).removeprefix("torch.")
        if kind not in _STORED_AS:
            raise EngineError(f"{name} is stored as {kind}; expected one of: {', '.join(_STORED_AS)}")
        header[name] = {
            "dtype": _STORED_AS[kind],
            "shape": list(like.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in layout:
            stream.write(read(name).reshape(-1).contiguous().view(torch.uint8).numpy())


def load_optimizer(optimizer: torch.optim.Optimizer, parts: Sequence[Mapping[str, Any]]) -> None:
    """Load moments and step counts that another number of workers stored into an optimizer.

    Raises:
        EngineError: The checkpoint has another number of parameters.
    """
    first = parts[0]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in first["param_groups"] for number in group["params"]]
    if len(numbers) != len(parameters):
        raise EngineError(
            f"the checkpoint's optimizer has {len(numbers)} parameters, this one has {len(parameters)}; resume with the same model"
        )
    state: dict[int, dict[str, Any]] = {}
    targets: dict[str, torch.Tensor] = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in first["state"].get(number, {}).items():
            if isinstance(value, DTensor):
                value = torch.zeros_like(parameter, dtype=value.dtype)
                targets[f"{number}.{key}"] = value
            elif isinstance(value, torch.Tensor):
                value = value.clone()  # verl may remove the file during the run
            state.setdefault(number, {})[key] = value
    named = [
        {
            f"{number}.{key}": value
            for number, values in part["state"].items()
            for key, value in values.items()
            if f"{number}.{key}" in targets
        }
        for part in parts
    ]
    _fill(targets, named)
    optimizer.load_state_dict({"state": state, "param_groups": first["param_groups"]})


def load_resharded(manager: Any, folder: Path) -> None:
    """Load a checkpoint that another number of workers stored into verl's ``FSDPCheckpointManager``.

    This restores weights, moments, step counts and the learning rate's schedule. A worker restores the random generators
    of the stored worker of its rank. A worker without a counterpart keeps its initial generators.

    Raises:
        EngineError: A file is missing, or FSDP2 did not store the checkpoint.
    """
    if manager.should_load_model:
        parts = read_shards(folder, "model")
        load_model(manager.model, parts, partly=manager.is_lora_only_state_dict(parts[0]))
    if manager.should_load_optimizer:
        load_optimizer(manager.optimizer, read_shards(folder, "optim"))
    if manager.should_load_extra:
        extra = read_shards(folder, "extra_state")
        if manager.rank < len(extra) and "rng" in extra[manager.rank]:
            manager.load_rng_state(extra[manager.rank]["rng"])
        schedule = extra[0]["lr_scheduler"]
        if schedule is not None and manager.lr_scheduler is not None:
            manager.lr_scheduler.load_state_dict(schedule)
    torch.distributed.barrier()
