"""Memory that a training needs on each GPU, estimated from the model's shape.

States of parameters, gradients and AdamW follow DeepSpeed's own estimators (0.19.8, ``estimate_zero2_...`` and
``estimate_zero3_model_states_mem_needs``) for ZeRO; the rest is in :mod:`afm.memory_arithmetic`. Nothing of it was ever
compared with a GPU by its authors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from afm.memory_arithmetic import MemoryNeed, ModelShape, activation_bytes, fsdp2_bytes


class Sharding(StrEnum):
    """How a model is spread over GPUs."""

    NONE = "one copy a GPU"
    ZERO2 = "ZeRO-2"
    ZERO3 = "ZeRO-3"
    ZERO3_OFFLOAD = "ZeRO-3, offloaded"
    FSDP2 = "FSDP2"


def memory_need(shape: ModelShape, config: Mapping[str, Any], sharding: Sharding, gpus: int) -> MemoryNeed:
    """What each of ``gpus`` needs for a configuration of LLaMA-Factory."""
    rows = int(config.get("per_device_train_batch_size") or 8)
    stage = config.get("stage", "sft")
    tokens = rows * int(config.get("cutoff_len") or 2048) * (2 if stage == "dpo" else 1)
    width = 2 if config.get("bf16") or config.get("fp16") or config.get("pure_bf16") else 4
    checkpointing = not config.get("disable_gradient_checkpointing")
    activations = activation_bytes(shape, tokens, width, checkpointing=checkpointing)
    # logits, their copy in fp32 and its gradient; Liger's fused loss never holds them all, but preferences are
    # computed from logits (0.9.5, train/dpo/trainer.py), those of the reference beside the policy's
    preferred = stage in ("dpo", "kto")
    logits = 0 if config.get("enable_liger_kernel") and not preferred else width + 4 + 4
    logits += width + 4 if _is_compared(config) else 0
    states = _states(shape, config, sharding, gpus, width) + _reference(shape, config, sharding, gpus, width)
    return MemoryNeed(states, activations, tokens * shape.vocab * logits)


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
    except (OSError, ValueError, LookupError, TypeError):
        return Sharding.NONE
    if not isinstance(zero, dict):
        return Sharding.NONE
    if zero.get("stage") == 3:
        return Sharding.ZERO3_OFFLOAD if zero.get("offload_param") else Sharding.ZERO3
    return Sharding.ZERO2 if zero.get("stage") == 2 else Sharding.NONE


def trained_parameters(shape: ModelShape, config: Mapping[str, Any]) -> int:
    """Parameters with gradients."""
    if config.get("finetuning_type", "lora") != "lora":
        return shape.parameters
    return shape.adapters(int(config.get("lora_rank") or 8), str(config.get("lora_target") or "all"))


def _is_compared(config: Mapping[str, Any]) -> bool:
    """Whether the policy is held against a reference: in KTO, and in DPO with most losses."""
    stage = config.get("stage", "sft")
    return stage == "kto" or (stage == "dpo" and config.get("pref_loss") not in ("orpo", "simpo"))


def _reference(
    shape: ModelShape, config: Mapping[str, Any], sharding: Sharding, gpus: int, width: int
) -> int:
    """Weights of the reference: a second model of that shape, or the same one without its adapters."""
    own = config.get("ref_model") or config.get("finetuning_type", "lora") != "lora"
    if not _is_compared(config) or not own:
        return 0
    match sharding:
        case Sharding.NONE | Sharding.ZERO2:
            return width * shape.parameters
        case Sharding.ZERO3 | Sharding.FSDP2:
            return width * shape.parameters // gpus
        case Sharding.ZERO3_OFFLOAD:
            return 0


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
            return fsdp2_bytes(shape, trained, gpus, width, frozen)
