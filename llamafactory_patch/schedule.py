"""How long a training is: the trainer's own arithmetic, done before there is a trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def training_steps(config: Mapping[str, Any], sequences: int | None, world: int) -> int | None:
    """Steps of the whole training (transformers 5.5.4, ``Trainer.set_initial_training_values``).

    Args:
        config: Of LLaMA-Factory.
        sequences: Of one epoch; ``None`` if that cannot be told, and then only ``max_steps`` tells.
        world: Number of devices.
    """
    if config.get("max_steps", -1) > 0:
        return int(config["max_steps"])
    if sequences is None:
        return None
    each = config.get("per_device_train_batch_size", 8) * world
    batches = sequences // each if config.get("dataloader_drop_last") else -(-sequences // each)
    updates = max(1, -(-batches // config.get("gradient_accumulation_steps", 1)))
    return math.ceil(float(updates * config.get("num_train_epochs", 3)))


def warmup_steps(config: Mapping[str, Any], steps: int) -> int:
    """Steps in which the learning rate rises; below 1 it is a share (transformers 5.5.4, ``get_warmup_steps``)."""
    given = config.get("warmup_ratio")
    warm = config.get("warmup_steps", 0) if given is None else given
    return int(warm) if warm >= 1 else math.ceil(steps * warm)


def validation_rows(rows: int, val_size: float) -> int:
    """Rows that ``val_size`` takes away from the training (LLaMA-Factory 0.9.5, data/data_utils.py, ``split_dataset``)."""
    if val_size <= 1e-6:
        return 0
    return int(val_size) if val_size > 1 or isinstance(val_size, int) else math.ceil(rows * val_size)
