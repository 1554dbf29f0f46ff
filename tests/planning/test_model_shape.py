import pytest

from afm.errors import ConfigError
from afm.planning import model_shape


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
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {
        "intermediate_size": 96,
        "vocab_size": 130,
        "tie_word_embeddings": kind == "Qwen3",
        "head_dim": 16,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert model_shape(str(tmp_path)).parameters == model.num_parameters()


@pytest.mark.parametrize(
    ("text", "told"), [("{", "no JSON"), ("[1]", "got list, expected a model's settings")]
)
def test_a_broken_config_is_an_error_that_names_the_file(text, told, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=told) as caught:
        model_shape(str(tmp_path))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_model_of_unknown_shape_has_none(tmp_path):
    assert model_shape("somebody/unknown") is None
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    assert model_shape(str(tmp_path)) is None
