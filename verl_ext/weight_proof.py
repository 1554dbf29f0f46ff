"""Proof that a rollout engine samples from the trainer's weights: every sync compares fingerprints of both.

A fingerprint is a sum over the bits of all elements, each multiplied by a key of its position, modulo 2**64. It is
exact: equal weights have equal fingerprints, and one changed bit changes the fingerprint. Sums add up over parts. Each
training worker reads its own shards, an engine reads its matrices part by part, and no process gathers a tensor.

The trainer's side reads the parameters that the optimizer updates, not the tensors that are sent. So it also detects a
sync that sends wrong tensors or none. An adapter that verl merges has no counterpart in the engine. In that case a
matrix must change between two syncs if its adapter does.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from afm.errors import EngineError
from verl_ext.algorithms import CPU_ENGINE
from verl_ext.engines import SHOW_WEIGHTS, CpuOptions
from verl_ext.lora import matrix_of, scale_of, served_name
from verl_ext.shards import piece

_SHOWN = 3
_CHUNK = 1 << 20
"""Number of elements that are read at a time. Their products take four bytes each."""


class WeightsDifferError(EngineError):
    """Raised when the engine does not serve the trainer's weights."""


def fingerprint(part: torch.Tensor, dtype: torch.dtype, row: int = 0, column: int = 0) -> int:
    """Return a part's share of the fingerprint of its tensor, as a signed 64-bit number.

    Args:
        part: Rows, or a block of rows and columns. Further dimensions count as columns.
        dtype: Data type in which the engine serves the tensor. Values are cast to it first.
        row: First row of the part in the whole tensor.
        column: First column of the part in the whole tensor.
    """
    if part.numel() == 0:
        return 0
    matrix = part.detach().reshape(part.size(0) if part.dim() else 1, -1)
    per_row = max(1, _CHUNK // matrix.size(1))
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    column_keys: torch.Tensor | None = None
    for begin in range(0, matrix.size(0), per_row):
        bits = _bits(matrix[begin : begin + per_row].to(dtype))
        if column_keys is None:
            first = column * bits.size(1) // matrix.size(1)
            column_keys = _keys(first, bits.size(1), matrix.device).to(torch.int32)
        rows = (bits * column_keys).sum(1, dtype=torch.int64)
        total += (rows * _keys(row + begin, rows.size(0), matrix.device)).sum()
    return int(total)


def _bits(matrix: torch.Tensor) -> torch.Tensor:
    """Return the elements as 32-bit integers. Two 16-bit elements share one if the number of columns is even."""
    size = matrix.element_size()
    if size == 2 and matrix.size(1) % 2:
        return matrix.view(torch.int16).to(torch.int32)
    if size not in (2, 4):
        raise EngineError(
            f"weights of type {matrix.dtype} have no fingerprint; expected a type of 16 or 32 bits"
        )
    return matrix.contiguous().view(torch.int32)


def _keys(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return odd 31-bit numbers for ``count`` indices from ``first`` on, mixed as in splitmix (Steele et al., 2014)."""
    index = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    mixed = (index * 0x9E3779B97F4A7C1) ^ (index * 0x1CE4E5B9 >> 13)
    return (mixed >> 29 & 0x7FFFFFFF) | 1


@dataclass(frozen=True, slots=True)
class Expected:
    """Fingerprints of the trainer's weights.

    Attributes:
        equal: Fingerprints that the engine must have, by the engine's names of tensors.
        adapters: Fingerprint of the adapter that verl merged into a tensor, by the name of the tensor.
    """

    equal: Mapping[str, int]
    adapters: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of all tensors that the engine must report."""
        return sorted({*self.equal, *self.adapters})


class WeightProof:
    """A training worker's side of the comparison.

    Args:
        dtype: Data type that the engine serves.
        merged: verl merges the adapters before it sends the weights (``model.lora.merge``).
        up_scale: Factor by which the engine multiplies the second part of an adapter when it loads the adapter.
        device: Device for the computation, ``None`` for the device of the shards.
    """

    def __init__(
        self, dtype: torch.dtype, *, merged: bool = False, up_scale: float = 1.0, device: Any = None
    ) -> None:
        self._dtype = dtype
        self._up_scale = up_scale
        self._merged = merged
        self._device = device
        self.complete = False
        self._adapters: Mapping[str, int] = {}
        self._served: Sequence[Mapping[str, int]] = ()

    def expect(self, module: torch.nn.Module) -> Expected:
        """Compute the fingerprints of the trainer's parameters. Every training worker must call this method.

        The first call reads all parameters. Later calls read the trained ones.

        Raises:
            EngineError: A parameter does not have FSDP2's layout.
        """
        shares: dict[str, int] = {}
        adapters: dict[str, int] = {}
        for name, parameter in module.named_parameters():
            if parameter.dim() > 2 or (self.complete and not parameter.requires_grad):
                continue  # experts of a mixture are sent one by one, with other names
            served, is_adapter = served_name(name)
            if self._merged and is_adapter:
                matrix = matrix_of(name)
                adapters[matrix] = signed(
                    adapters.get(matrix, 0) + self._share(name, parameter, torch.float32)
                )
            else:
                shares[served] = self._share(name, parameter, self._dtype)
        for matrix in adapters:
            shares.pop(matrix, None)
        equal, merged = _summed_over_workers([shares, adapters])
        return Expected(equal, merged)

    def _share(self, name: str, parameter: torch.Tensor, dtype: torch.dtype) -> int:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        local, offset = piece(name, parameter, rank)
        if not _counts(parameter, rank):
            return 0
        if self._device is not None:
            local = local.to(self._device)
        if self._merged and parameter.requires_grad is False:
            local = local.to(
                torch.bfloat16
            )  # verl then sends all weights in bfloat16, with any data type of the engine
        if ".lora_B." in name and self._up_scale != 1:
            local = local.to(dtype) * self._up_scale
        row, column = (*offset, 0, 0)[:2]
        return fingerprint(local, dtype, row, column)

    def check(self, expected: Expected, served: Sequence[Mapping[str, int]], step: int | None) -> None:
        """Compare the trainer's fingerprints with those of each engine.

        Raises:
            WeightsDifferError: The weights of this sync did not arrive.
        """
        before = self._served or [{}] * len(served)
        for number, (engine, earlier) in enumerate(zip(served, before, strict=True)):
            wrong = [*_differences(expected, engine), *self._unmoved(expected, engine, earlier)]
            if wrong:
                raise WeightsDifferError(_message(wrong, expected, step, number, len(served)))
        self.complete, self._adapters, self._served = True, expected.adapters, served

    def _unmoved(
        self, expected: Expected, engine: Mapping[str, int], before: Mapping[str, int]
    ) -> Iterator[str]:
        for name, adapter in expected.adapters.items():
            moved = name in self._adapters and self._adapters[name] != adapter
            if name in engine and moved and engine[name] == before.get(name):
                yield f"{name} did not change, though its adapter did"


def _counts(parameter: torch.Tensor, rank: int) -> bool:
    """Return whether this worker's part counts. Of several copies the first one counts."""
    if not isinstance(parameter, DTensor):
        return rank == 0
    [coordinate] = (parameter.device_mesh.mesh == rank).nonzero().tolist()
    copies = [
        at for at, placement in zip(coordinate, parameter.placements, strict=True) if placement.is_replicate()
    ]
    return not any(copies)


def _summed_over_workers(shares: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [dict(share) for share in shares]
    values = [value for share in shares for value in share.values()]
    on_cpu = "gloo" in str(torch.distributed.get_backend_config())
    total = torch.tensor(values, dtype=torch.int64, device="cpu" if on_cpu else "cuda")
    torch.distributed.all_reduce(total)
    numbers = iter(total.tolist())
    return [{name: next(numbers) for name in share} for share in shares]


def signed(value: int) -> int:
    """Return a sum of fingerprints as a signed 64-bit number, as torch does."""
    return (value + 2**63) % 2**64 - 2**63


def _differences(expected: Expected, engine: Mapping[str, int]) -> Iterator[str]:
    for name in expected.names:
        if name not in engine:
            yield f"{name} is not served"
        elif name in expected.equal and engine[name] != expected.equal[name]:
            yield f"{name} differs"


def _message(wrong: Sequence[str], expected: Expected, step: int | None, number: int, engines: int) -> str:
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    which = f" {number + 1} of {engines}" if engines > 1 else ""
    total = len(expected.names)
    return (
        f"the weights of step {step} did not reach the rollout engine{which}: of {total} tensors {len(wrong)} are wrong "
        f"({'; '.join(wrong[:_SHOWN])}{more}). The episodes would come from another model. Resume from the last "
        "checkpoint; if it happens again, the transfer of weights is broken (weight_proof: false turns this check off)"
    )


def proof_of(worker: Any) -> WeightProof | None:
    """Return the proof of a training worker of verl. If weights are not compared, log the reason and return ``None``."""
    if not hasattr(worker, "afm_proof"):
        worker.afm_proof, reason = _make(worker)
        if reason and worker.rank == 0:
            print(f"the rollout engine's weights are not compared with the trainer's: {reason}", flush=True)
    proof: WeightProof | None = worker.afm_proof
    return proof


def _make(worker: Any) -> tuple[WeightProof | None, str]:
    from verl.utils.device import get_device_id
    from verl.utils.fsdp_utils import fsdp_version
    from verl.utils.torch_dtypes import PrecisionType

    rollout = worker.config.rollout
    if not wanted(rollout):
        return None, "weight_proof is false"
    if fsdp_version(worker.actor.engine.module) != 2:
        return None, "the trainer does not use FSDP2 (actor.strategy: fsdp2)"
    if rollout.get("quantization"):
        return None, f"the engine quantizes them ({rollout.quantization})"
    if rollout.name not in SHOW_WEIGHTS:
        return (
            None,
            f"{rollout.name} does not expose them (the alarm `mismatch` ends the run if probabilities differ)",
        )
    settings = CpuOptions.of(rollout) if rollout.name == CPU_ENGINE else rollout
    dtype = PrecisionType.to_dtype(settings.dtype)
    lora = worker.config.model.get("lora") or {}
    module = worker.actor.engine.module
    adapter = getattr(module, "peft_config", {}).get("default")  # vLLM scales an adapter when it loads it
    proof = WeightProof(
        dtype,
        merged=bool(lora.get("merge")),
        up_scale=scale_of(adapter.to_dict()) if adapter is not None and rollout.name == "vllm" else 1.0,
        device=get_device_id() if torch.cuda.is_available() else None,
    )
    return proof, ""


def wanted(rollout: Any) -> bool:
    """Return whether a run compares weights: the setting ``weight_proof`` of ``afm rl``, else true."""
    return bool((getattr(rollout, "custom", None) or {}).get("weight_proof", True))


async def compare(proof: WeightProof, expected: Expected, rollout: Any, step: int | None) -> None:
    """Get the fingerprints of the engines of verl's ``rollout``, and compare them.

    Raises:
        WeightsDifferError: The weights of this sync did not arrive.
    """
    first = not proof.complete
    if (served := await rollout.served_fingerprints(expected.names)) is None:
        # The engine's other worker asks. It adds up its shares with this one, so both must read the same tensors.
        proof.complete = True
        return
    proof.check(expected, served, step)
    if first:
        print(f"weights: {len(expected.names)} tensors of the rollout engine equal the trainer's", flush=True)


async def compare_received(worker: Any, step: int | None) -> None:
    """Compare the weights of an engine on separate devices with those that the trainer published.

    Raises:
        WeightsDifferError: They differ.
    """
    if worker.rollout_config.name not in SHOW_WEIGHTS or not wanted(worker.rollout_config):
        return
    if not hasattr(worker, "afm_proof"):
        worker.afm_proof = WeightProof(torch.float32)  # only its memory of the last sync is used
    if (expected := published()) is not None:
        await compare(worker.afm_proof, expected, worker.server_adapter, step)


def publish(proof: WeightProof, expected: Expected) -> None:
    """Publish the trainer's fingerprints for engines on separate devices, before the weights are sent."""
    from ray.experimental.internal_kv import _internal_kv_put

    if torch.distributed.get_rank() == 0:
        _internal_kv_put(_key(), pickle.dumps(expected), overwrite=True)
    proof.complete = True


def published() -> Expected | None:
    """Return the fingerprints that the trainer published last, ``None`` if it does not compare weights."""
    from ray.experimental.internal_kv import _internal_kv_get

    message = _internal_kv_get(_key())
    return None if message is None else pickle.loads(message)


def _key() -> bytes:
    import ray

    return f"afm_weights_{ray.get_runtime_context().get_job_id()}".encode()
