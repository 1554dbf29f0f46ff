"""Memory of a training: formulas that fine-tuning and reinforcement learning share. Never compared with a GPU.

Activations assume attention that does not store its scores (flash, sdpa).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from afm.planning.findings import Finding, Level
from afm.planning.model_shape import ModelShape

GIB = 1024**3
_USABLE = 0.92
"""Of a GPU's memory; the rest is the driver's and fragmentation."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on each GPU.

    Attributes:
        states: Parameters, gradients, optimizer.
        engine: What a rollout engine on the same GPU holds meanwhile.
    """

    states: int
    activations: int = 0
    logits: int = 0
    engine: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.states + self.activations + self.logits + self.engine


def described(need: MemoryNeed) -> str:
    """A need in GiB and its parts."""
    parts = {"states": need.states, "activations": need.activations, "logits": need.logits}
    if need.engine:
        parts["rollout engine"] = need.engine
    listed = " + ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    return f"{need.total / GIB:.1f} GiB a GPU = {listed}"


def activation_bytes(shape: ModelShape, tokens: int, width: int, *, checkpointing: bool) -> int:
    """What the forward pass of ``tokens`` on one GPU keeps for the backward pass, and the layer under work.

    Args:
        width: Bytes of a number.
        checkpointing: Only the input of each layer is kept, and one layer at a time recomputed.
    """
    layer = layer_bytes(shape, tokens, width)
    if not checkpointing:
        return shape.layers * layer
    return shape.layers * tokens * shape.hidden * width + layer


def layer_bytes(shape: ModelShape, tokens: int, width: int) -> int:
    """What one layer holds while ``tokens`` pass through it."""
    return tokens * (width * (8 * shape.hidden + 4 * shape.mlp) + 8 * shape.hidden)


def fsdp2_bytes(shape: ModelShape, trained: int, gpus: int, width: int, frozen: int = 0) -> int:
    """Parameters, gradients and AdamW in fp32, sharded over ``gpus``, and the largest module unsharded.

    Args:
        width: Bytes of a frozen parameter.
    """
    return 4 * shape.embedding + 16 * trained // gpus + width * frozen // gpus


def fits(need_bytes: float, gpu_gib: float) -> bool:
    """Whether it fits on a GPU, with room for the driver and fragmentation."""
    return need_bytes < _USABLE * gpu_gib * GIB


def disk_finding(need_bytes: float, folder: Path, what: str, advice: str) -> Finding:
    """Whether ``what`` fits on the disk of ``folder``, which need not exist yet."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    text = f"{need_bytes / GIB:,.1f} GiB for {what}, {free / GIB:,.1f} GiB free at {there}"
    enough = need_bytes < free
    return Finding(Level.OK if enough else Level.ERROR, "disk", text + ("" if enough else f"; {advice}"))
