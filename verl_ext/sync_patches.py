"""Patches of verl 0.9.1 and vLLM with which weights arrive, and prove it (:mod:`verl_ext.weight_proof`).

vLLM fuses matrices (``qkv_proj``, ``gate_up_proj``) and splits them over the processes of an engine. Each process adds
up the fingerprints of its blocks of a trainer's tensor, by their positions in it. The trainer's worker adds the sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from afm.errors import EngineError
from verl_ext.lora import SCALE_KEYS
from verl_ext.patching import VLLM_ON_CPU, after_import, patch, target

if TYPE_CHECKING:
    import torch

    _Block = tuple[str, torch.Tensor, int, int]
    """Name of a trainer's tensor, a block of it, and the first row and column of the block."""


@patch(
    "vllm.model_executor.layers.utils",
    "dispatch_cpu_unquantized_gemm",
    cpu_only=True,
    release=VLLM_ON_CPU,
)
def keep_linear_weights(original: Any) -> Any:
    """Let vLLM on a CPU load new weights.

    Symptom: the first update fails with ``'Parameter' object has no attribute 'weight_loader'``.
    Cause: vllm/model_executor/layers/linear.py:202 packs each weight for oneDNN and drops the original, which an update
    needs as its target. With the original kept, verl packs the new weights after each update, because its worker
    extension (verl/workers/rollout/vllm_rollout/utils.py:329) calls ``process_weights_after_loading``. The weights take
    twice the memory.
    """

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        original(layer, remove_weight=False)

    return dispatch_cpu_unquantized_gemm


@patch("verl.workers.engine_workers", "ActorRolloutRefWorker.update_weights")
def prove_sync(original: Any) -> Any:
    """End a run whose rollout engine does not have the trainer's weights after a sync.

    Symptom: an adapter was never delivered, and the run continued for two months (verl issue 7495).
    Cause: verl/workers/engine_workers.py:728 sends what another function collects, and checks nothing that arrives.
    """

    @wraps(original)
    async def update_weights(self: Any, global_steps: int | None = None, mode: str = "auto") -> Any:
        from verl_ext.weight_proof import compare, proof_of, publish

        if (proof := proof_of(self)) is None:
            return await original(self, global_steps=global_steps, mode=mode)
        expected = proof.expect(self.actor.engine.module)
        separate = (self.config.rollout.checkpoint_engine.backend if mode == "auto" else mode) != "naive"
        if separate:
            publish(proof, expected)
        result = await original(self, global_steps=global_steps, mode=mode)
        if not separate:
            await compare(proof, expected, self.rollout, global_steps)
        return result

    return update_weights


@patch("verl.checkpoint_engine.base", "CheckpointEngineWorker.update_weights")
def prove_received_weights(original: Any) -> Any:
    """End a run whose engine on separate devices does not have the trainer's weights after a sync.

    Symptom: see :func:`prove_sync`.
    Cause: verl/checkpoint_engine/base.py:354 accepts whatever arrives. In a LoRA run that is the model without its adapter.
    """

    @wraps(original)
    async def update_weights(self: Any, global_steps: int | None = None) -> None:
        from verl_ext.weight_proof import compare_received

        await original(self, global_steps=global_steps)
        await compare_received(self, global_steps)

    return update_weights


@patch("verl.checkpoint_engine.base", "CheckpointEngineManager.update_weights")
def note_sync(original: Any) -> Any:
    """Record the step whose weights were sent last, for :func:`miss_no_sync`.

    Symptom: see :func:`prove_sync`.
    Cause: verl/checkpoint_engine/base.py:510 does not record it.
    """

    @wraps(original)
    def update_weights(self: Any, global_steps: int | None = None) -> Any:
        result = original(self, global_steps=global_steps)
        if global_steps is not None:
            self.afm_synced = global_steps
        return result

    return update_weights


@patch("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.on_step_begin")
def miss_no_sync(original: Any) -> Any:
    """End a run that begins a step with the weights of an earlier step.

    Symptom: see :func:`prove_sync`.
    Cause: verl/trainer/ppo/v1/trainer_base.py:665 leaves the sync to each trainer. Synchronous and colocated trainers sync
    in each step. Trainers with separate engines have their own ``on_step_begin`` and may skip steps.
    """

    def on_step_begin(self: Any) -> None:
        original(self)
        synced = getattr(self.checkpoint_manager, "afm_synced", None)
        custom = self.config.actor_rollout_ref.rollout.get("custom") or {}
        if custom.get("weight_proof", True) and synced != self.global_steps - 1:
            raise EngineError(
                f"step {self.global_steps} begins, but the rollout engine has the weights of step {synced}, not of "
                f"step {self.global_steps - 1}: a sync was skipped (weight_proof: false turns this check off)"
            )

    return on_step_begin


@patch("verl.workers.rollout.vllm_rollout.vllm_async_server", "vLLMHttpServer.collective_rpc")
def return_replies(original: Any) -> Any:
    """Let the trainer read the replies of vLLM's workers.

    Symptom: fingerprints of an engine's weights do not arrive.
    Cause: verl/workers/rollout/vllm_rollout/vllm_async_server.py:256 drops the replies.
    """

    async def collective_rpc(self: Any, method: Any, *args: Any, **options: Any) -> Any:
        return await self.engine.collective_rpc(method, *args, **options)

    return collective_rpc


@patch("verl.workers.rollout.vllm_rollout.vllm_rollout", "ServerAdapter._execute_method")
def report_failed_updates(original: Any) -> Any:
    """Let a run end when a vLLM worker fails while it loads new weights.

    Symptom: the run waits forever, without a message.
    Cause: verl/workers/rollout/vllm_rollout/vllm_rollout.py:229 starts the worker's part and reads its reply only after all
    weights are sent. Before that, bucketed_weight_transfer.py waits in ``socket.recv()`` for the failed worker.
    """

    async def _execute_method(self: Any, method: str, *args: Any, **options: Any) -> Any:
        from verl_ext.ray_watch import report_if_it_fails

        reply = await original(self, method, *args, **options)
        if hasattr(reply, "future"):  # not awaited
            report_if_it_fails(reply, f"in {method}")
        return reply

    return _execute_method


@patch("verl.utils.checkpoint.fsdp_checkpoint_manager", "FSDPCheckpointManager._get_lora_train_meta")
def store_how_an_adapter_scales(original: Any) -> Any:
    """Store with a checkpoint all of peft's settings that its adapter's scale depends on.

    Symptom: a run that continued an adapter with ``use_rslora`` exported a model whose adapter was too weak (2 instead of 8
    for rank 16 and alpha 32).
    Cause: verl/utils/checkpoint/fsdp_checkpoint_manager.py:277 stores rank and alpha only.
    """

    @wraps(original)
    def _get_lora_train_meta(self: Any, unwrap_model: Any) -> Any:
        if (meta := original(self, unwrap_model)) is None:
            return None
        peft = unwrap_model.peft_config["default"].to_dict()
        return {key: peft[key] for key in SCALE_KEYS if key in peft} | meta

    return _get_lora_train_meta


def register() -> None:
    """Add methods for fingerprints of weights to vLLM's workers and to verl's adapter of vLLM."""
    after_import("verl.workers.rollout.vllm_rollout.utils", _vllm_worker)
    after_import("verl.workers.rollout.vllm_rollout.vllm_rollout", _vllm_adapter)


def _vllm_worker(module: ModuleType) -> None:
    target(module, "vLLMColocateWorkerExtension").afm_fingerprints = fingerprints_of_worker


def _vllm_adapter(module: ModuleType) -> None:
    target(module, "ServerAdapter").served_fingerprints = fingerprints_of_engine


@dataclass(frozen=True, slots=True)
class _Part:
    """A block of one of the trainer's tensors.

    Attributes:
        name: The trainer's name, without the suffix ``.weight`` or ``.bias``.
        begin: First row of the block in this process's fused tensor.
        rows: Number of its rows there.
        row: First row of the block in the whole tensor.
        counts: This process counts the block. Other processes may hold copies.
    """

    name: str
    begin: int
    rows: int
    row: int
    counts: bool = True


def fingerprints_of_worker(self: Any, names: Sequence[str]) -> dict[str, int]:
    """Return a vLLM worker's share of the fingerprints of the named tensors that it holds. A method of the worker."""
    from verl_ext.weight_proof import fingerprint, signed

    runner = self.model_runner
    wanted, shares = set(names), dict[str, int]()
    for name, block, row, column in (*_weights(runner.get_model()), *_adapter(runner)):
        if name in wanted:
            shares[name] = signed(shares.get(name, 0) + fingerprint(block, block.dtype, row, column))
    return shares


async def fingerprints_of_engine(self: Any, names: Sequence[str]) -> list[dict[str, int]] | None:
    """Return the sums over all of an engine's workers, ``None`` on a rank without a server. A method of verl's adapter."""
    from verl_ext.weight_proof import signed

    workers = await self._execute_method("afm_fingerprints", args=(list(names),))
    if workers is None:
        return None
    total: dict[str, int] = {}
    for shares in workers:
        for name, share in shares.items():
            total[name] = signed(total.get(name, 0) + share)
    return [total]


def _weights(model: Any) -> Iterator[_Block]:
    for path, module in model.named_modules():
        for key in ("weight", "bias"):
            if (tensor := module._parameters.get(key)) is None:
                continue
            column = _first_column(module, tensor) if key == "weight" else None  # each process has the bias
            for part in _parts(
                module, path.replace(".base_layer", ""), model, tensor.size(0), whole=column is None
            ):
                if part.counts:
                    block = tensor[part.begin : part.begin + part.rows]
                    yield f"{part.name}.{key}", block, part.row, column or 0


def _adapter(runner: Any) -> Iterator[_Block]:
    """Yield the blocks of the adapter from the layers' buffers, which the forward pass reads."""
    if (manager := getattr(getattr(runner, "lora_manager", None), "_adapter_manager", None)) is None:
        return
    slots = [(slot, number) for slot, number in enumerate(manager.lora_index_to_id) if number is not None]
    for slot, number in slots[:1]:  # verl serves one adapter
        rank = manager._registered_adapters[number].rank
        for path, layer in manager.modules.items():
            if hasattr(layer, "n_slices"):
                yield from _adapter_of_layer(layer, path, runner.get_model(), slot, rank)


def _adapter_of_layer(layer: Any, path: str, model: Any, slot: int, rank: int) -> Iterator[_Block]:
    from verl_ext.lora import parts_of_matrix

    base = layer.base_layer
    column = _first_column(base, layer.lora_a_stacked[0][slot, 0])
    rows = sum(stacked.size(2) for stacked in layer.lora_b_stacked)
    for part, down, up in zip(
        _parts(base, path, model, rows, whole=True),  # of `up`, which is split by rows only
        layer.lora_a_stacked,
        layer.lora_b_stacked,
        strict=True,
    ):
        down_name, up_name = parts_of_matrix(f"{part.name}.weight")
        if _first(base) or column is not None:
            yield down_name, down[slot, 0, :rank], 0, column or 0
        if part.counts:
            yield up_name, up[slot, 0, :, :rank], part.row, 0


def _parts(module: Any, path: str, model: Any, rows: int, *, whole: bool) -> list[_Part]:
    """Return the blocks of the trainer's tensors that make up the rows of a layer's weight or bias."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    at = getattr(module, "tp_rank", 0)
    parent, _, last = path.rpartition(".")
    if "VocabParallelEmbedding" in kinds:  # with padding at its end
        held = module.shard_indices
        return [_Part(path, 0, held.num_org_elements, held.org_vocab_start_index)]
    if "QKVParallelLinear" in kinds:
        copies = module.num_kv_head_replicas
        value = getattr(module, "v_head_size", module.head_size)
        sizes: tuple[int, ...] = (
            module.num_heads * module.head_size,
            module.num_kv_heads * module.head_size,
            module.num_kv_heads * value,
        )
        places: tuple[int, ...] = (at, at // copies, at // copies)
        counts: tuple[bool, ...] = (True, at % copies == 0, at % copies == 0)
    elif "MergedColumnParallelLinear" in kinds:
        sizes = tuple(module.output_partition_sizes)
        places, counts = (at,) * len(sizes), (True,) * len(sizes)
    elif "ColumnParallelLinear" in kinds:
        return [_Part(path, 0, rows, at * rows)]
    else:  # split by columns over the processes, or copied to each process
        return [_Part(path, 0, rows, 0, counts=not whole or _first(module))]
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    names = packed.get(last, [last])
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    fused = zip(names, begins, sizes, places, counts, strict=True)
    return [
        _Part(f"{parent}.{name}", begin, size, place * size, own) for name, begin, size, place, own in fused
    ]


def _first_column(module: Any, tensor: torch.Tensor) -> int | None:
    """Return the first column of this process, ``None`` if each process has all columns."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    return module.tp_rank * tensor.size(-1) if "RowParallelLinear" in kinds else None


def _first(module: Any) -> bool:
    """Return whether this process is the first of its engine, which counts what all processes have."""
    if hasattr(module, "tp_rank"):
        return bool(module.tp_rank == 0)
    from vllm.distributed import get_tensor_model_parallel_rank  # type: ignore[import-not-found,unused-ignore]

    return bool(get_tensor_model_parallel_rank() == 0)
