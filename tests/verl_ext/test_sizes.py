from dataclasses import replace
from typing import Any

import pytest

from afm.findings import Level
from afm.memory_arithmetic import Hardware, model_shape
from verl_ext.sizes import RunSizes, budget_faults, split_findings

SHAPE = model_shape("Qwen/Qwen2.5-7B")  # 28 heads, 4 key-value heads


def errors(sizes: RunSizes) -> list[str]:
    return [finding.text for finding in split_findings(sizes, SHAPE) if finding.level is Level.ERROR]


def test_what_divides_is_said(sizes: RunSizes) -> None:
    assert [finding.text for finding in split_findings(sizes, SHAPE)] == [
        "8 GPUs: 4 rollout engines of 2, 4 data ranks of 2",
        "16 prompts x 8 samples = 128 per step, 2 updates of 64 samples (16 per data rank)",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_parallel": 3}, "8 GPUs are not divisible by actor.ulysses_sequence_parallel_size=3; expected one of 1, 2, 4, 8"),
        ({"tensor_parallel": 3}, "= 3: the rest would have no rollout engine; expected one of 1, 2, 4, 8"),
        ({"tensor_parallel": 8}, "28 attention heads are not divisible by rollout.tensor_model_parallel_size=8; expected one of [1, 2, 4]"),
        ({"tensor_parallel": 7}, "18944 intermediate features are not divisible by rollout.tensor_model_parallel_size=7; expected one of [1, 2, 4]"),
        ({"sequence_parallel": 7}, "4 key-value heads and actor.ulysses_sequence_parallel_size=7: neither is a multiple of the other; expected one of 1, 2, 4"),
        ({"filtered": False, "gen_batch": 5}, "data.train_batch_size=16 is not a multiple of data.gen_batch_size=5"),
        ({"shards": 3}, "8 GPUs are not divisible by actor's fsdp_size=3; expected -1 for all GPUs, or one of 1, 2, 4, 8"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_an_error(sizes: RunSizes, changes: dict[str, Any], message: str) -> None:
    plain = {key: value for key, value in changes.items() if key not in ("tensor_parallel", "shards")}
    sizes = replace(sizes, **plain)
    if size := changes.get("tensor_parallel"):
        sizes = replace(sizes, engine=replace(sizes.engine, tensor_parallel=size))
    if shards := changes.get("shards"):
        sizes = replace(sizes, actor=replace(sizes.actor, shards=shards))
    found = errors(sizes)
    assert any(message in error for error in found), found


def test_an_engine_of_a_multiple_of_the_key_value_heads_copies_them(sizes: RunSizes) -> None:
    found = errors(replace(sizes, sequence_parallel=28))
    assert found
    assert not any("key-value" in error for error in found)


def test_an_engine_lies_in_whole_nodes(sizes: RunSizes) -> None:
    engine = replace(sizes.engine, node_gpus=3, tensor_parallel=4)
    across = replace(sizes, hardware=Hardware(4, 3, 80), engine=engine)
    assert "an engine of 4 GPUs" in errors(across)[0]
    assert (
        "into nodes of 3 GPUs; expected an engine of 1, 3 GPUs, or nodes of 4 or 8 GPUs" in errors(across)[0]
    )
    two_nodes = replace(sizes, engine=replace(sizes.engine, tensor_parallel=4, data_parallel=2))
    assert errors(two_nodes) == []


def test_group_filtering_leaves_gen_batch_size_without_a_meaning(sizes: RunSizes) -> None:
    found = [f for f in split_findings(replace(sizes, gen_batch=32), SHAPE) if f.level is Level.WARNING]
    assert [finding.text for finding in found] == [
        "data.gen_batch_size is 32; with group filtering verl fetches prompts one by one; remove it"
    ]
    ahead = replace(sizes, filtered=False, ahead=True, gen_batch=5)
    texts = [f.text for f in split_findings(ahead, SHAPE) if f.subject == "batch"]
    assert texts[0].startswith("data.gen_batch_size is 5; in its asynchronous trainers verl fetches")


def test_without_a_shape_the_gpus_are_still_counted(sizes: RunSizes) -> None:
    wrong = replace(sizes, sequence_parallel=3)
    assert [f.level for f in split_findings(wrong, None)] == [Level.ERROR]


def test_engines_on_gpus_of_their_own_divide_those(sizes: RunSizes) -> None:
    apart = replace(sizes, engine=replace(sizes.engine, own_gpus=6))
    assert next(split_findings(apart, SHAPE)).text == "14 GPUs: 3 rollout engines of 2, 4 data ranks of 2"
    odd = replace(sizes, engine=replace(sizes.engine, own_gpus=5))
    assert errors(odd)[0].startswith("5 GPUs are not divisible by rollout.tensor_model_parallel_size")
    # In nodes of their own, whatever those of the trainer are.
    engine, actor = replace(sizes.engine, own_gpus=4, tensor_parallel=4), replace(sizes.actor, shards=6)
    assert errors(replace(sizes, hardware=Hardware(1, 6, 80), engine=engine, actor=actor)) == []


def test_every_pass_has_room_for_the_longest_sample(sizes: RunSizes) -> None:
    assert list(budget_faults(sizes)) == []
    place = replace(sizes.actor, tokens=499)
    passes = {"actor": replace(place, tokens=400), "reference": place, "critic": replace(place, tokens=999)}
    small = replace(sizes, log_prob_tokens=499, **passes)
    least = "fewer than the longest sample has (1,000); raise it to"
    assert list(budget_faults(small)) == [
        f"actor.ppo_max_token_len_per_gpu: 400 tokens x 2 GPUs, {least} 500",
        f"rollout.log_prob_max_token_len_per_gpu: 499 tokens x 2 GPUs, {least} 500",
        f"ref.log_prob_max_token_len_per_gpu: 499 tokens x 2 GPUs, {least} 500",
        f"critic.ppo_infer_max_token_len_per_gpu: 999 tokens x 1 GPUs, {least} 1000",
    ]
    [critic] = budget_faults(replace(small, packed=False))  # verl packs the critic's batches always
    assert critic.startswith("critic.ppo_infer_max_token_len_per_gpu: 999 tokens")
