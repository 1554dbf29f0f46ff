"""The tiny model: a byte-level tokenizer trained on the data, and a small random Qwen2.

Both are saved in the usual Hugging Face layout, so every engine loads them like any other model. The sizes result from
measurements. With initialisation 0.02 and rotary base 10,000, as in large models, the model did not learn to copy
numbers within three minutes. With 0.08 and 1,000 it did. It learned single-digit tokens, but not two-digit tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from afm.errors import ConfigError, MissingExtraError
from afm.models.load import silent_progress

PAD_TOKEN, START_TOKEN, END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML without a default system prompt."""

_SMALLEST_VOCABULARY = 256 + 3


_TAG_OR_WORD = r"</?[a-z_]+>|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}<]+|<|\s+(?!\S)|\s+"
"""GPT-2's pattern of words, with ``<tag>`` and ``</tag>`` as separate words."""


def train_tokenizer(
    texts: Iterable[str], out_dir: str | Path, *, vocab_size: int = 512, whole_tags: bool = False
) -> int:
    """Train a byte-level BPE with single-digit tokens on ``texts`` and save it with the chat template.

    Any text can be encoded and decodes to itself.

    Args:
        whole_tags: Allow merges to make a single token of ``<tag>``. Trajectories of short texts become a fifth shorter.

    Returns:
        The number of tokens. It is less than ``vocab_size`` if the texts offer no more merges.

    Raises:
        ConfigError: ``vocab_size`` leaves no room for the 256 bytes and the 3 special tokens.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise ConfigError(
            f"vocab_size is {vocab_size}, expected at least {_SMALLEST_VOCABULARY} (256 bytes, 3 special tokens)"
        )
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise MissingExtraError("transformers", "sft") from None

    backend = Tokenizer(models.BPE())
    digits, words = pre_tokenizers.Digits(individual_digits=True), []
    if whole_tags:
        words = [pre_tokenizers.Split(Regex(_TAG_OR_WORD), "isolated")]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not whole_tags)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, *words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, START_TOKEN, END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_with_role_names(texts), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[START_TOKEN],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(str(out_dir))
    return len(tokenizer)


def create_tiny_model(
    tokenizer_dir: str | Path,
    out_dir: str | Path,
    *,
    seed: int = 0,
    hidden_size: int = 128,
    layers: int = 3,
    heads: int = 8,
    mlp: int = 384,
    rope_theta: float = 1000.0,
    initializer_range: float = 0.08,
    max_positions: int = 4096,
) -> int:
    """Save a randomly initialised Qwen2 with tied embeddings, and the tokenizer next to it.

    The vocabulary has exactly the tokenizer's size, so every id that the model can sample is a token. The global random
    state is not changed.

    Returns:
        The number of parameters.

    Raises:
        ConfigError: ``hidden_size`` is not an even multiple of ``heads``.
    """
    if hidden_size % heads or (hidden_size // heads) % 2:
        per_head = f"hidden_size {hidden_size} divided by heads {heads}"
        raise ConfigError(f"{per_head} is not an even integer; choose other sizes")
    try:
        import torch

        _quiet_deepspeed(torch.cuda.is_available())
        from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM
    except ImportError:
        raise MissingExtraError("transformers", "sft") from None

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir))
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        dtype="float32",
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    with silent_progress():
        model.save_pretrained(str(out_dir))
    tokenizer.save_pretrained(str(out_dir))
    return int(model.num_parameters())


def _quiet_deepspeed(has_gpu: bool) -> None:
    """Tell DeepSpeed, which transformers imports, that there is no GPU. Otherwise it warns that it found none."""
    if not has_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _with_role_names(texts: Iterable[str]) -> Iterable[str]:
    """Add the words of the chat template, so that prompts do not begin with single letters."""
    yield from texts
    yield from ["user\n", "assistant\n"] * 200
