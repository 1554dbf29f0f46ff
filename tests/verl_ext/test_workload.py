from dataclasses import replace
from typing import Any

import pytest

from afm.findings import Level
from afm.memory_arithmetic import Hardware, model_shape
from verl_ext.workload import Workload, split_findings

SHAPE = model_shape("Qwen/Qwen2.5-7B")  # 28 heads, 4 key-value heads


def errors(load: Workload) -> list[str]:
    return [finding.text for finding in split_findings(load, SHAPE) if finding.level is Level.ERROR]


def test_what_divides_is_said(workload: Workload) -> None:
    assert [finding.text for finding in split_findings(workload, SHAPE)] == [
        "8 GPUs: 4 rollout engines of 2, 4 data ranks of 2",
        "16 prompts x 8 samples = 128 a step, 2 updates of 64 samples (16 a data rank)",
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sequence_parallel": 3}, "8 GPUs do not divide by actor.ulysses_sequence_parallel_size=3"),
        ({"sequence_parallel": 8}, "28 attention heads do not divide by actor.ulysses_sequence_parallel_size=8"),
        ({"tensor_parallel": 3}, "8 GPUs do not divide by rollout.tensor_model_parallel_size x data_parallel_size = 3"),
        ({"tensor_parallel": 8}, "28 attention heads do not divide by rollout.tensor_model_parallel_size=8; expected one of [1, 2, 4]"),
        ({"tensor_parallel": 7}, "4 key-value heads and rollout.tensor_model_parallel_size=7"),
        ({"tensor_parallel": 7}, "18944 intermediate features do not divide by rollout.tensor_model_parallel_size=7"),
        ({"sequence_parallel": 7}, "4 key-value heads and actor.ulysses_sequence_parallel_size=7: neither"),
        ({"filtered": False, "gen_batch": 5}, "data.train_batch_size=16 is no multiple of data.gen_batch_size=5"),
        ({"shards": 3}, "8 GPUs do not divide by actor's fsdp_size=3"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_an_error(workload: Workload, changes: dict[str, Any], told: str) -> None:
    plain = {key: value for key, value in changes.items() if key not in ("tensor_parallel", "shards")}
    load = replace(workload, **plain)
    if size := changes.get("tensor_parallel"):
        load = replace(load, engine=replace(load.engine, tensor_parallel=size))
    if shards := changes.get("shards"):
        load = replace(load, actor=replace(load.actor, shards=shards))
    found = errors(load)
    assert any(told in error for error in found), found


def test_an_engine_lies_in_whole_nodes(workload: Workload) -> None:
    across = replace(
        workload, hardware=Hardware(4, 3, 80), engine=replace(workload.engine, tensor_parallel=4)
    )
    assert "an engine of 4 GPUs" in errors(across)[0]
    assert "into nodes of 3" in errors(across)[0]


def test_group_filtering_leaves_gen_batch_size_without_a_meaning(workload: Workload) -> None:
    found = [f for f in split_findings(replace(workload, gen_batch=32), SHAPE) if f.level is Level.WARNING]
    assert [finding.text for finding in found] == [
        "data.gen_batch_size is 32; with group filtering verl fetches prompts one by one; leave it out"
    ]
    ahead = replace(workload, filtered=False, ahead=True, gen_batch=5)
    told = [f.text for f in split_findings(ahead, SHAPE) if f.subject == "batch"]
    assert told[0].startswith("data.gen_batch_size is 5; in its asynchronous trainers verl fetches")


def test_without_a_shape_the_gpus_are_still_counted(workload: Workload) -> None:
    wrong = replace(workload, sequence_parallel=3)
    assert [f.level for f in split_findings(wrong, None)] == [Level.ERROR]


def test_engines_on_gpus_of_their_own_divide_those(workload: Workload) -> None:
    apart = replace(workload, engine=replace(workload.engine, own_gpus=6))
    assert next(split_findings(apart, SHAPE)).text == "14 GPUs: 3 rollout engines of 2, 4 data ranks of 2"
    odd = replace(workload, engine=replace(workload.engine, own_gpus=5))
    assert errors(odd)[0].startswith("5 GPUs do not divide by rollout.tensor_model_parallel_size")
