from dataclasses import replace
from pathlib import Path

import pytest

from afm.errors import ConfigError
from afm.findings import Level
from afm.memory_arithmetic import (
    GIB,
    MemoryNeed,
    activation_bytes,
    described,
    disk_finding,
    fits,
    fsdp2_bytes,
    gpu_finding,
    layer_bytes,
    missing_model_files,
    model_shape,
    recipe_hardware,
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


def test_a_need_above_the_limit_says_the_limit_and_what_it_is_a_share_of():
    large = MemoryNeed(79 * GIB)
    assert str(gpu_finding("update", large, 80, "use more GPUs")).endswith(
        "update: 79.0 GiB a GPU = states 79.0 + activations 0.0 + logits 0.0, "
        "more than 73.6 GiB (92% of the 80 GiB of a GPU); use more GPUs"
    )
    levels = [gpu_finding("x", *case).level for case in ((large, 90, "a"), (large, 80, "a"), (large, 80, ""))]
    assert levels == [Level.OK, Level.WARNING, Level.OK]


@pytest.mark.parametrize("unit", ["GB", "GiB"])
def test_hardware_is_read_in_both_units_and_printed_in_one(tmp_path, unit):
    (tmp_path / "run.yaml").write_text(f"# Hardware: 1 node x 8 GPUs of 80 {unit}.\n", encoding="utf-8")
    assert str(recipe_hardware(tmp_path / "run.yaml")) == "1 node x 8 GPUs of 80 GiB"


def test_a_full_disk_of_a_machine_that_cannot_run_it_is_only_a_warning(tmp_path):
    found = disk_finding(1e18, tmp_path, "a model", "keep fewer", here=False)
    assert found.level is Level.WARNING
    assert ". The run needs GPUs, which this machine lacks, so check" in found.text
    assert disk_finding(1.0, tmp_path, "a model", "keep fewer", here=False).level is Level.OK


@pytest.mark.parametrize(("size", "level"), [(1.0, Level.OK), (1e18, Level.ERROR)])
def test_the_disk_of_a_folder_that_is_not_there_yet_is_looked_at(tmp_path, size, level):
    found = disk_finding(size, tmp_path / "a" / "b", "2 checkpoints", "keep fewer")
    assert (found.level, found.subject) == (level, "disk")
    assert f"free at {tmp_path}" in found.text
    assert found.text.endswith("; keep fewer") is (level is Level.ERROR)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("meta-llama/Llama-2-7b-chat-hf", 6_738_415_616),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", 32_763_876_352),
    ],
)
def test_shapes_known_by_name_have_the_published_number_of_parameters(name, parameters):
    assert model_shape(name).parameters == parameters


@pytest.mark.parametrize("kind", ["Qwen2", "Llama", "Qwen3"])
def test_parameters_are_those_of_the_model_that_transformers_builds(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, vocab_size=130, tie_word_embeddings=kind == "Qwen3",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert model_shape(str(tmp_path)).parameters == model.num_parameters()


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ("[1]", "got list, expected a model's settings")]
)
def test_a_broken_config_is_an_error_that_names_the_file(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        model_shape(str(tmp_path))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_model_of_unknown_shape_has_none(tmp_path):
    assert model_shape("somebody/unknown") is None
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    assert model_shape(str(tmp_path)) is None


@pytest.mark.parametrize("tokenizer", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_a_tokenizer_in_the_files_of_its_own_kind_is_one_too(tmp_path: Path, tokenizer: str) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert missing_model_files(tmp_path) == ["tokenizer (tokenizer.json or tokenizer.model or vocab.json)"]
    (tmp_path / tokenizer).touch()
    assert missing_model_files(tmp_path) == []
