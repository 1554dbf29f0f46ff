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


def engine(sizes: RunSizes, **changes: Any) -> RunSizes:
    return replace(sizes, engine=replace(sizes.engine, **changes))


def test_an_engine_of_more_gpus_than_heads_copies_them_and_one_without_room_holds_nothing(
    sizes: RunSizes,
) -> None:
    assert kv_cache(engine(sizes, tensor_parallel=8), SHAPE).token_bytes == 2 * 2 * 28 * 1 * 128
    cache = kv_cache(engine(sizes, memory_share=0.05), SHAPE)
    assert (cache.tokens < 0, cache.sequences) == (True, 0)


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
    assert {need.engine for need in phases(engine(sizes, sleeps=False), SHAPE).values()} == {40 * GIB}


def test_weights_reach_an_engine_that_slept_before_its_cache_does(sizes: RunSizes) -> None:
    staged = phases(sizes, SHAPE)["weights to engine"]
    assert (staged.states, staged.engine) == (4 * P // 8 + 2 * GIB, P)


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
    of_vllm = engine(sizes, name="vllm")
    assert host_bytes(of_vllm, SHAPE) == 12 * P // 8 * 4
    adapter = replace(of_vllm, lora_rank=16)
    assert host_bytes(adapter, SHAPE) > (4 * P // 8 + P) * 4


def test_engines_on_gpus_of_their_own_leave_the_trainers_alone(sizes: RunSizes) -> None:
    apart = replace(sizes, engine=replace(sizes.engine, own_gpus=8, sleeps=False))
    needs = phases(apart, SHAPE)
    assert needs.keys() == {"rollout", "weights to engine", "log-probs", "actor update"}
    assert {name: need.engine for name, need in needs.items() if need.engine} == {"rollout": 40 * GIB}
    assert host_bytes(apart, SHAPE) == 12 * P // 8 * 4


@pytest.mark.parametrize(
    ("kept", "steps", "counted"),
    [
        (1, 100, "2 checkpoints"),  # the old one goes when the new one is complete
        (3, 10, "2 checkpoints"),  # no more are written
        (2, 4, "1 checkpoint "),
        (None, 100, "20 checkpoints"),
        (2, None, "2 checkpoints"),
    ],
)
def test_checkpoints_that_stand_at_once_are_counted(
    sizes: RunSizes, tmp_path: Path, kept: int | None, steps: int | None, counted: str
) -> None:
    found = checkpoint_finding(replace(sizes, kept=kept), SHAPE, tmp_path, steps)
    assert f"the exported model and {counted}" in found.text
    assert f"of {12 * EACH:.1f} GiB" in found.text  # fp32 shards and two moments
    number = int(counted.split()[0])
    assert found.text.startswith(f"{(4 + number * 12) * EACH:,.1f} GiB for")


@pytest.mark.parametrize(
    ("changes", "bytes_each"),
    [
        ({"saved": ("model",)}, 4),
        ({"critic": CRITIC}, 24),
        ({"saved": ("model", "optimizer", "extra", "hf_model")}, 16),  # the whole model once more
    ],
)
def test_a_checkpoint_holds_what_is_saved(
    sizes: RunSizes, tmp_path: Path, changes: dict[str, Any], bytes_each: int
) -> None:
    found = checkpoint_finding(replace(sizes, **changes), SHAPE, tmp_path, 100)
    assert f"of {bytes_each * EACH:.1f} GiB" in found.text


WHOLE = ("model", "optimizer", "extra", "hf_model")


@pytest.mark.parametrize(
    ("changes", "steps", "level", "text"),
    [
        ({"kept": 10**6}, None, Level.ERROR, "lower trainer.max_actor_ckpt_to_keep"),
        ({"kept": 10**6, "saved": WHOLE}, None, Level.ERROR, "leave hf_model out"),
        ({"kept": None}, None, Level.WARNING, "set trainer.max_actor_ckpt_to_keep"),
        ({"save_every": -1}, 100, Level.WARNING, "no model is exported"),
    ],
)
def test_what_the_disk_cannot_hold_or_nobody_knows_is_told_with_a_way_out(
    sizes: RunSizes, tmp_path: Path, changes: dict[str, Any], steps: int | None, level: Level, text: str
) -> None:
    found = checkpoint_finding(replace(sizes, **changes), SHAPE, tmp_path, steps)
    assert (found.level, text in found.text) == (level, True), found.text
