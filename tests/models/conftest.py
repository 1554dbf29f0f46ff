"""A tiny random model, made once a session, and its engine."""

import pytest

TEXTS = [
    f"Tom has {n} apples and buys {n * 7}. <plan>Add them.</plan><code>print({n} + {n * 7})</code>"
    for n in range(400)
]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    from afm.models.tiny import create_tiny_model, train_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    train_tokenizer(TEXTS, folder, vocab_size=400)
    create_tiny_model(folder, folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_dir):
    """(model, tokenizer)"""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype="float32", attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # generate() is the reference for texts of given length
    return model, AutoTokenizer.from_pretrained(tiny_dir)
