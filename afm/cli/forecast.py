"""How long a training from a pre-trained model takes on this computer, and whether it fits in memory."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from afm.errors import ConfigError
from afm.memory_arithmetic import GIB, ModelShape, described, free_bytes, model_shape, multiplies_bfloat16

Training = tuple[Path, Sequence[str]]
"""A configuration and its overrides."""

_EPISODE_TOKENS = 125
"""Of a word problem with its chat template, program and answer; counted with the tokenizer of SmolLM2."""
_SHARE_OF_SPEED = 0.6
"""What a training makes of the speed of large matrix products; the rest is attention, optimizer and copies."""
_STARTS_S = 150
"""Two engines start, the team solves its problems, programs run."""
_DRAWN = 1.5
"""Samples drawn for each one trained on: groups that are all right or all wrong are drawn again."""
_FORWARD, _UPDATE = 2, 6
"""Floating-point operations for each parameter and token."""


def forecast(sft: Training, rl: Training, episodes: int) -> str:
    """Minutes and memory of fine-tuning, reinforcement and evaluations, in one line.

    Args:
        episodes: Of all evaluations together.

    Raises:
        ConfigError: The training needs more memory than is free.
    """
    from llamafactory_patch.config import resolve
    from llamafactory_patch.doctor import cpu_need as sft_need
    from verl_ext.compose import compose, overrides_of
    from verl_ext.memory_arithmetic import cpu_need as rl_need
    from verl_ext.settings import load_settings
    from verl_ext.sizes import sizes_of

    job = resolve(*sft)
    folder = str(job.config["model_name_or_path"])
    shape = model_shape(folder)
    if shape is None:
        raise ConfigError(
            f"{folder}: config.json does not say the sizes of a dense model; choose another --base"
        )
    sizes = sizes_of(compose(overrides_of(load_settings(*rl))))
    factors = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")
    rows = math.prod(int(job.config[key]) for key in factors)
    drawn = (sizes.steps or 0) * sizes.episodes
    passes = (
        _UPDATE * rows + drawn * (_DRAWN * _FORWARD + _FORWARD + _UPDATE * sizes.passes) + _FORWARD * episodes
    )
    seconds = passes * _EPISODE_TOKENS * shape.parameters / (_SHARE_OF_SPEED * matrix_speed()) + _STARTS_S
    need = max(sft_need(job.config, shape), rl_need(sizes, shape), key=lambda need: need.total)
    free = free_bytes()
    if free is not None and need.total > free:
        raise ConfigError(
            f"{folder}: the training needs {described(need, '')}, {free / GIB:.1f} GiB are free; choose a smaller --base, "
            "or end other programs"
        )
    return f"{_size(shape)}, about {seconds / 60:.0f} minutes and {need.total / GIB:.0f} GiB in {_number_format()}"


def matrix_speed() -> float:
    """Floating-point operations a second of float32 products on all cores, as fast as they are now."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    left, right = torch.ones(1024, 576), torch.ones(576, 1536)
    left @ right
    begun, count = time.monotonic(), 0
    while (passed := time.monotonic() - begun) < 1.0:
        left @ right
        count += 1
    return 2 * 1024 * 576 * 1536 * count / passed


def _size(shape: ModelShape) -> str:
    return f"{shape.parameters / 1e6:,.0f} M parameters"


def _number_format() -> str:
    if multiplies_bfloat16():
        return "float32 (fine-tuning in bfloat16)"
    return "float32: this processor has no instructions for bfloat16"
