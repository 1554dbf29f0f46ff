import os
import subprocess
import sys

import pytest

from afm.errors import ConfigError
from afm.models.tiny import create_tiny_model, train_tokenizer

TEXTS = [f"Tom has {n} apples. <code>print({n} + 7)</code>" for n in range(300)]


@pytest.fixture
def tokenizer(tiny):
    return tiny[1]


@pytest.mark.parametrize("whole_tags", [False, True])
def test_digits_and_whole_tags_are_tokens_and_every_text_survives(tmp_path, whole_tags):
    from transformers import AutoTokenizer

    train_tokenizer(TEXTS, tmp_path, vocab_size=340, whole_tags=whole_tags)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("12 apples.</code>", add_special_tokens=False)
    tokens = [tokenizer.decode([token]) for token in ids]
    assert tokens[:4] == ["1", "2", " apples", "."]
    assert (tokens[4:] == ["</code>"]) is whole_tags
    for text in (
        "a<b> < c <<d>> <E> </ x",
        "Grüße, 北京 🙂\t\x00 1234\r\n  <|x|> it's",
        "".join(map(chr, range(300))),
    ):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_chat_template_is_chatml_without_a_system_prompt_and_its_tokens_have_ids_of_their_own(tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    closed = tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": "Yo"}], tokenize=False
    )
    assert closed == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>", add_special_tokens=False) == [0, 1, 2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)


def test_the_model_has_the_tokenizers_vocabulary_and_the_recipes_shape(tiny_dir, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    assert model.get_input_embeddings().weight.shape == (len(tokenizer), 128)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert (model.config.num_hidden_layers, model.config.num_attention_heads) == (3, 8)
    assert model.config.rope_parameters["rope_theta"] == 1000.0
    assert model.generation_config.eos_token_id == 2
    assert 0.07 < model.get_input_embeddings().weight[3:].std().item() < 0.09


def test_a_seed_gives_the_same_weights_and_leaves_the_global_generator_alone(tiny_dir, tmp_path):
    import torch
    from safetensors.torch import load_file

    torch.manual_seed(5)
    before = torch.get_rng_state()
    create_tiny_model(tiny_dir, tmp_path / "same", seed=1)
    create_tiny_model(tiny_dir, tmp_path / "other", seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [load_file(path / "model.safetensors") for path in (tiny_dir, tmp_path / "same")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    other = load_file(tmp_path / "other" / "model.safetensors")
    assert not torch.equal(weights[0]["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_impossible_sizes_are_refused(tiny_dir, tmp_path):
    with pytest.raises(ConfigError, match="at least 259"):
        train_tokenizer(TEXTS, tmp_path, vocab_size=258)
    with pytest.raises(ConfigError, match="hidden_size 100"):
        create_tiny_model(tiny_dir, tmp_path, hidden_size=100, heads=8)


def test_a_script_that_makes_a_model_prints_nothing_of_its_libraries(tmp_path):
    lines = ["from afm.models.tiny import create_tiny_model, train_tokenizer"]
    lines += ['train_tokenizer(["<a>b</a>"], "start", vocab_size=300)', 'create_tiny_model("start", "start")']
    script = [sys.executable, "-c", "\n".join(lines)]
    env = {
        name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "TQDM_DISABLE")
    }
    done = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
