from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afm.findings import Level
from afm.memory_arithmetic import GIB, model_shape
from verl_ext.memory_arithmetic import checkpoint_finding, host_bytes, kv_cache, phases
from verl_ext.sizes import Placement, RunSizes

SHAPE = model_shape("Qwen/Qwen2.5-7B")
assert SHAPE is not None
P, E = SHAPE.parameters, SHAPE.vocab * SHAPE.hidden
CRITIC = Placement(tokens=1000, shards=8, moves_parameters=True, moves_optimizer=True, stays_on_cpu=False)
EACH = P / GIB  # of one byte a parameter
LAYER = 2 * (8 * 3584 + 4 * 18944) + 8 * 3584  # bytes of a token in the layer under work


def test_the_cache_is_what_the_weights_leave(sizes: RunSizes) -> None:
    cache = kv_cache(sizes, SHAPE)
    assert cache.weight_bytes == 2 * P // 2
    assert cache.token_bytes == 2 * 2 * 28 * 2 * 128  # keys and values, bf16, 28 layers, 2 of 4 heads of 128
    assert cache.tokens == (40 * GIB - P) // cache.token_bytes
    assert cache.sequences == cache.tokens // 1000


def test_an_engine_of_more_gpus_than_heads_copies_them(sizes: RunSizes) -> None:
    wide = replace(sizes, engine=replace(sizes.engine, tensor_parallel=8))
    assert kv_cache(wide, SHAPE).token_bytes == 2 * 2 * 28 * 1 * 128


def test_no_episode_fits_where_the_weights_do_not(sizes: RunSizes) -> None:
    small = replace(sizes, engine=replace(sizes.engine, memory_share=0.05))
    assert kv_cache(small, SHAPE).tokens < 0
    assert kv_cache(small, SHAPE).sequences == 0


def test_an_update_has_everything_there_and_logits_with_their_gradient(sizes: RunSizes) -> None:
    need = phases(sizes, SHAPE)["actor update"]
    assert need.states == 16 * P // 8 + 4 * E
    assert need.activations == 28 * 500 * 3584 * 2 + 500 * LAYER
    assert need.logits == 500 * 152064 * 4
    assert need.engine == 0
    entropy = phases(replace(sizes, entropy_bonus=True), SHAPE)["actor update"]
    assert entropy.logits == 500 * 152064 * 8
    assert phases(replace(sizes, fused_logits=True), SHAPE)["actor update"].logits == 0


def test_what_is_moved_away_frees_the_rollout_and_what_stays_does_not(sizes: RunSizes) -> None:
    assert phases(sizes, SHAPE)["rollout"].states == 0
    assert phases(sizes, SHAPE)["rollout"].engine == 40 * GIB
    staying = replace(sizes, actor=replace(sizes.actor, moves_parameters=False, moves_optimizer=False))
    assert phases(staying, SHAPE)["rollout"].states == 4 * P // 8 + 8 * P // 8
    on_cpu = replace(sizes, actor=replace(sizes.actor, stays_on_cpu=True))
    assert phases(on_cpu, SHAPE)["actor update"].states == 4 * E
    assert phases(on_cpu, SHAPE)["rollout"].states == 0


def test_an_engine_that_does_not_sleep_costs_every_phase(sizes: RunSizes) -> None:
    awake = replace(sizes, engine=replace(sizes.engine, sleeps=False))
    assert {need.engine for name, need in phases(awake, SHAPE).items() if name != "weights to engine"} == {
        40 * GIB
    }


def test_weights_reach_an_engine_that_slept_before_its_cache_does(sizes: RunSizes) -> None:
    staged = phases(sizes, SHAPE)["weights to engine"]
    assert (staged.states, staged.engine) == (4 * P // 8 + 2 * GIB, P)
    whole = replace(sizes, engine=replace(sizes.engine, sleeps=False))
    assert phases(whole, SHAPE)["weights to engine"].engine == 40 * GIB


def test_a_critic_has_no_vocabulary_and_a_reference_no_optimizer(sizes: RunSizes) -> None:
    reference = replace(CRITIC, stays_on_cpu=True)
    ppo = phases(replace(sizes, critic=CRITIC, reference=reference), SHAPE)
    assert ppo["critic update"].logits == 0
    assert ppo["critic update"].states == 16 * (P - E) // 8 + 4 * E
    assert ppo["reference"].states == 4 * E
    assert ppo["reference"].logits == 1000 * 152064 * 6
    assert "critic update" not in phases(sizes, SHAPE)


def test_adapters_need_states_for_themselves_alone(sizes: RunSizes) -> None:
    adapters = SHAPE.adapters(16, "all")
    need = phases(replace(sizes, lora_rank=16), SHAPE)["actor update"]
    assert need.states == (4 * P + 12 * adapters) // 8 + 4 * E


def test_a_node_holds_what_its_gpus_moved_away(sizes: RunSizes) -> None:
    assert host_bytes(sizes, SHAPE) == (12 * P // 8 + P) * 4
    everything = replace(sizes, critic=CRITIC, reference=replace(CRITIC, stays_on_cpu=True))
    expected = 12 * P // 8 + 12 * (P - E) // 8 + 4 * P // 8 + P
    assert host_bytes(everything, SHAPE) == pytest.approx(expected * 4, rel=1e-9)


def test_engines_on_gpus_of_their_own_leave_the_trainers_alone(sizes: RunSizes) -> None:
    apart = replace(sizes, engine=replace(sizes.engine, own_gpus=8, sleeps=False))
    needs = phases(apart, SHAPE)
    assert {name: need.engine for name, need in needs.items()} == {
        "rollout": 40 * GIB, "weights to engine": 0, "log-probs": 0, "actor update": 0,
    }  # fmt: skip
    assert host_bytes(apart, SHAPE) == 12 * P // 8 * 4


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
    assert f"of {12 * EACH:.1f} GiB" in found.text  # fp32 shards and two moments


def test_the_sum_is_compared_with_the_disk(sizes: RunSizes, tmp_path: Path) -> None:
    found = checkpoint_finding(sizes, SHAPE, tmp_path, 100)
    assert found.text.startswith(f"{(4 + 2 * 12) * EACH:.1f} GiB for")
    none = checkpoint_finding(replace(sizes, saved=("model",)), SHAPE, tmp_path, 100)
    assert f"of {4 * EACH:.1f} GiB" in none.text
    ppo = checkpoint_finding(replace(sizes, critic=CRITIC), SHAPE, tmp_path, 100)
    assert f"of {24 * EACH:.1f} GiB" in ppo.text
    twice = checkpoint_finding(replace(sizes, saved=(*sizes.saved, "hf_model")), SHAPE, tmp_path, 100)
    assert f"of {16 * EACH:.1f} GiB" in twice.text  # the whole model once more
    many = replace(sizes, kept=10**6, saved=(*sizes.saved, "hf_model"))
    assert "leave hf_model out" in checkpoint_finding(many, SHAPE, tmp_path, None).text
    huge = checkpoint_finding(replace(sizes, kept=10**6), SHAPE, tmp_path, None)
    assert (huge.level, "lower trainer.max_actor_ckpt_to_keep" in huge.text) == (Level.ERROR, True)


def test_what_nobody_knows_or_nobody_saves_is_a_warning(sizes: RunSizes, tmp_path: Path) -> None:
    unknown = checkpoint_finding(replace(sizes, kept=None), SHAPE, tmp_path, None)
    assert (unknown.level, "set trainer.max_actor_ckpt_to_keep" in unknown.text) == (Level.WARNING, True)
    never = checkpoint_finding(replace(sizes, save_every=-1), SHAPE, tmp_path, 100)
    assert (never.level, "no model is exported" in never.text) == (Level.WARNING, True)
