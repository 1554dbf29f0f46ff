from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afm.findings import Level
from afm.memory_arithmetic import model_shape
from verl_ext.memory_arithmetic import checkpoint_finding
from verl_ext.sizes import Placement, RunSizes

SHAPE = model_shape("Qwen/Qwen2.5-7B")
assert SHAPE is not None
GIB = SHAPE.parameters / 1024**3  # of one byte a parameter


@pytest.mark.parametrize(
    ("changes", "steps", "kept"),
    [
        ({"kept": 2}, 100, "2 checkpoints"),
        ({"kept": 1}, 100, "2 checkpoints"),  # the old one goes when the new one is complete
        ({"kept": 3}, 10, "2 checkpoints"),  # no more are written
        ({"kept": 2}, 4, "1 checkpoint "),
        ({"kept": None}, 100, "20 checkpoints"),
        ({"kept": 2}, None, "2 checkpoints"),
    ],
)
def test_checkpoints_that_stand_at_once_are_counted(
    sizes: RunSizes, tmp_path: Path, changes: dict[str, Any], steps: int | None, kept: str
) -> None:
    found = checkpoint_finding(replace(sizes, **changes), SHAPE, tmp_path, steps)
    assert f"the exported model and {kept}" in found.text
    assert f"of {12 * GIB:.1f} GiB" in found.text  # fp32 shards and two moments


def test_the_sum_is_compared_with_the_disk(sizes: RunSizes, tmp_path: Path) -> None:
    found = checkpoint_finding(sizes, SHAPE, tmp_path, 100)
    assert found.text.startswith(f"{(4 + 2 * 12) * GIB:.1f} GiB for")
    none = checkpoint_finding(replace(sizes, saved=("model",)), SHAPE, tmp_path, 100)
    assert f"of {4 * GIB:.1f} GiB" in none.text
    place = Placement(1, 8, moves_parameters=True, moves_optimizer=True, stays_on_cpu=False)
    ppo = checkpoint_finding(replace(sizes, critic=place), SHAPE, tmp_path, 100)
    assert f"of {24 * GIB:.1f} GiB" in ppo.text
    twice = checkpoint_finding(replace(sizes, saved=(*sizes.saved, "hf_model")), SHAPE, tmp_path, 100)
    assert f"of {16 * GIB:.1f} GiB" in twice.text  # the whole model once more
    many = replace(sizes, kept=10**6, saved=(*sizes.saved, "hf_model"))
    assert "leave hf_model out" in checkpoint_finding(many, SHAPE, tmp_path, None).text
    huge = checkpoint_finding(replace(sizes, kept=10**6), SHAPE, tmp_path, None)
    assert (huge.level, "lower trainer.max_actor_ckpt_to_keep" in huge.text) == (Level.ERROR, True)


def test_what_nobody_knows_or_nobody_saves_is_a_warning(sizes: RunSizes, tmp_path: Path) -> None:
    unknown = checkpoint_finding(replace(sizes, kept=None), SHAPE, tmp_path, None)
    assert (unknown.level, "set trainer.max_actor_ckpt_to_keep" in unknown.text) == (Level.WARNING, True)
    never = checkpoint_finding(replace(sizes, save_every=-1), SHAPE, tmp_path, 100)
    assert (never.level, "no model is exported" in never.text) == (Level.WARNING, True)
