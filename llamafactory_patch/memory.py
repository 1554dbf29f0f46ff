"""Memory that a training needs on each GPU, estimated from the model's shape.

States of parameters, gradients and AdamW follow DeepSpeed's own estimators (0.19.8, ``estimate_zero2_...`` and
``estimate_zero3_model_states_mem_needs``) for ZeRO, and fp32 shards for FSDP2. Activations assume attention that
does not store its scores (flash, sdpa). Nothing of it was ever compared with a GPU by its authors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

_LAYER_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Sharding(StrEnum):
    """How a model is spread over GPUs."""

    NONE = "one copy a GPU"
    ZERO2 = "ZeRO-2"
    ZERO3 = "ZeRO-3"
    ZERO3_OFFLOAD = "ZeRO-3, offloaded"
    FSDP2 = "FSDP2"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the size of a dense decoder (Llama, Qwen2, Qwen3) follows from."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    qkv_bias: bool
    head_norms: bool
    max_positions: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear modules of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        shapes += [(self.hidden, self.mlp), (self.hidden, self.mlp), (self.mlp, self.hidden)]
        return dict(zip(_LAYER_MODULES, shapes, strict=True))

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        layer = sum(inputs * outputs for inputs, outputs in self.linears.values()) + 2 * self.hidden
        layer += (
            self.heads + 2 * self.kv_heads
        ) * self.head_dim * self.qkv_bias + 2 * self.head_dim * self.head_norms
        return self.layers * layer + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, the largest single module."""
        return self.vocab * self.hidden

    def adapters(self, rank: int, targets: str) -> int:
        """Parameters of LoRA adapters of ``rank`` on ``targets`` (``all``, or module names with commas)."""
        names = _LAYER_MODULES if targets == "all" else [name.strip() for name in targets.split(",")]
        linears = self.linears
        return self.layers * sum(rank * sum(linears[name]) for name in names if name in linears)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on each GPU."""

    states: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.states + self.activations + self.logits


def model_shape(name_or_folder: str) -> ModelShape | None:
    """Shape of a model in a folder, or of a Qwen2.5 of 3B, 7B or 32B by its name; else ``None``."""
    file = Path(name_or_folder).expanduser() / "config.json"
    if file.is_file():
        return _shape_of(json.loads(file.read_text(encoding="utf-8")))
    known = re.fullmatch(r"Qwen/Qwen2\.5-(?:Coder-)?(3|7|32)B(?:-Instruct)?", name_or_folder)
    return _QWEN[known[1]] if known else None


def memory_need(shape: ModelShape, config: Mapping[str, Any], sharding: Sharding, gpus: int) -> MemoryNeed:
    """What each of ``gpus`` needs for a configuration of LLaMA-Factory."""
    rows = int(config.get("per_device_train_batch_size") or 8)
    tokens = rows * int(config.get("cutoff_len") or 2048)
    width = 2 if config.get("bf16") or config.get("fp16") or config.get("pure_bf16") else 4
    layer = tokens * (width * (8 * shape.hidden + 4 * shape.mlp) + 8 * shape.hidden)
    if config.get("disable_gradient_checkpointing"):
        activations = shape.layers * layer
    else:
        activations = shape.layers * tokens * shape.hidden * width + layer
    # logits, their copy in fp32 and its gradient; Liger's fused loss never holds them all
    logits = 0 if config.get("enable_liger_kernel") else tokens * shape.vocab * (width + 4 + 4)
    return MemoryNeed(_states(shape, config, sharding, gpus, width), activations, logits)


def sharding_of(config: Mapping[str, Any]) -> Sharding:
    """How the configuration spreads the model."""
    if config.get("fsdp"):
        return Sharding.FSDP2
    settings = config.get("deepspeed")
    if not settings:
        return Sharding.NONE
    try:
        zero = (
            settings if isinstance(settings, dict) else json.loads(Path(settings).read_text(encoding="utf-8"))
        )
        zero = zero["zero_optimization"]
    except (OSError, ValueError, KeyError):
        return Sharding.NONE
    if zero.get("stage") == 3:
        return Sharding.ZERO3_OFFLOAD if zero.get("offload_param") else Sharding.ZERO3
    return Sharding.ZERO2 if zero.get("stage") == 2 else Sharding.NONE


def trained_parameters(shape: ModelShape, config: Mapping[str, Any]) -> int:
    """Parameters with gradients."""
    if config.get("finetuning_type", "lora") != "lora":
        return shape.parameters
    return shape.adapters(int(config.get("lora_rank") or 8), str(config.get("lora_target") or "all"))


def _states(shape: ModelShape, config: Mapping[str, Any], sharding: Sharding, gpus: int, width: int) -> int:
    trained = trained_parameters(shape, config)
    frozen = shape.parameters - trained if trained < shape.parameters else 0
    largest = 4 * shape.embedding
    match sharding:
        case Sharding.NONE:
            return 16 * trained + width * frozen
        case Sharding.ZERO2:
            return 2 * trained + 18 * trained // gpus + width * frozen
        case Sharding.ZERO3:
            return largest + 18 * trained // gpus + width * frozen // gpus
        case Sharding.ZERO3_OFFLOAD:
            return largest
        case Sharding.FSDP2:
            return largest + 16 * trained // gpus + width * frozen // gpus


def _shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if any(not isinstance(config.get(key), int) for key in needed) or config.get("num_experts"):
        return None
    kind = str(config.get("model_type"))
    heads = config["num_attention_heads"]
    return ModelShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        mlp=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        head_norms=kind == "qwen3",
        max_positions=int(config.get("max_position_embeddings") or 0),
    )


def _qwen(
    hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool
) -> ModelShape:
    return ModelShape(hidden, layers, heads, kv_heads, 128, mlp, vocab, tied, True, False, 32768)


_QWEN = {
    "3": _qwen(2048, 36, 16, 2, 11008, 151936, True),
    "7": _qwen(3584, 28, 28, 4, 18944, 152064, False),
    "32": _qwen(5120, 64, 40, 8, 27648, 152064, False),
}
