from dataclasses import replace

import pytest

from afm.planning import Level, model_shape
from afm.planning.memory import (
    GIB,
    MemoryNeed,
    activation_bytes,
    described,
    disk_finding,
    fits,
    fsdp2_bytes,
    layer_bytes,
)

SMALL = replace(model_shape("Qwen/Qwen2.5-7B"), hidden=10, layers=3, mlp=20, vocab=100)


def test_checkpointing_keeps_the_input_of_each_layer_and_one_layer_at_work():
    layer = 5 * (2 * (8 * 10 + 4 * 20) + 8 * 10)
    assert layer_bytes(SMALL, 5, 2) == layer == 2000
    assert activation_bytes(SMALL, 5, 2, checkpointing=True) == 3 * 5 * 10 * 2 + layer
    assert activation_bytes(SMALL, 5, 2, checkpointing=False) == 3 * layer


def test_fsdp2_shards_sixteen_bytes_a_trained_parameter_and_gathers_the_embedding():
    assert fsdp2_bytes(SMALL, 800, 4, 2) == 4 * 100 * 10 + 16 * 800 // 4
    assert fsdp2_bytes(SMALL, 0, 4, 2, frozen=800) == 4000 + 2 * 800 // 4


def test_a_gpu_keeps_eight_percent_for_itself():
    assert fits(0.91 * 80 * GIB, 80)
    assert not fits(0.93 * 80 * GIB, 80)


def test_a_need_names_its_parts():
    assert described(MemoryNeed(GIB, 2 * GIB)) == (
        "3.0 GiB a GPU = states 1.0 + activations 2.0 + logits 0.0"
    )
    assert described(MemoryNeed(0, engine=GIB)).endswith("logits 0.0 + rollout engine 1.0")


@pytest.mark.parametrize(("size", "level"), [(1.0, Level.OK), (1e18, Level.ERROR)])
def test_the_disk_of_a_folder_that_is_not_there_yet_is_looked_at(tmp_path, size, level):
    found = disk_finding(size, tmp_path / "a" / "b", "2 checkpoints", "keep fewer")
    assert (found.level, found.subject) == (level, "disk")
    assert f"free at {tmp_path}" in found.text
    assert found.text.endswith("; keep fewer") is (level is Level.ERROR)
