"""A Hugging Face folder from a GGUF file: weights, configuration, tokenizer, chat template, end tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from afm.errors import AfmError, ConfigError
from afm.models.gguf_file import GgufFile, build_tokenizer, check_tokenizer
from afm.models.load import silent_progress

_CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of Llama 3.1 and later: the factor by which each rotary frequency is lowered."""


def import_gguf(file: str | Path, out_dir: str | Path) -> int:
    """Write the model in ``file`` as a Hugging Face folder.

    Returns:
        The number of parameters.

    Raises:
        ConfigError: The architecture or tokenizer is unknown, or a part of the file is missing.
    """
    model = GgufFile(Path(file))
    from transformers import GenerationConfig

    try:
        tokenizer = build_tokenizer(model)
        network, weights = _network(model)
    except AfmError:
        raise
    except Exception as error:  # wrong sizes and types fail at many places of these libraries
        raise model.fault(f"its parts do not fit together, so it may be damaged: {error}") from error
    end_ids = sorted({tokenizer.eos_token_id, *model.end_ids})
    out = Path(out_dir)
    network.config.pad_token_id = tokenizer.pad_token_id
    network.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id
    )
    try:
        tokenizer.save_pretrained(str(out))
        with silent_progress():
            network.save_pretrained(str(out), state_dict=weights)
    except Exception as error:  # noqa: BLE001 - the libraries of both have no common class for a full disk
        why = f"the model cannot be written: {error}; delete files there, or choose another --output-dir"
        raise ConfigError(f"{out.parent}: {why}") from None
    check_tokenizer(out, tokenizer, model)
    return int(network.num_parameters())


def _network(file: GgufFile) -> tuple[Any, dict[str, Any]]:
    """Return the model without memory for its weights, and the weights by their Hugging Face names."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors = file.tensors
    factors = tensors.pop(_ROPE_FACTORS, None)
    config = AutoConfig.for_model(file.architecture, **_settings(file, tensors))
    if factors is not None:
        config.rope_parameters = _llama3_rope(file, config, file.read(factors))
    weights = dict(_named_weights(file, tensors, config))
    kinds = {weight.dtype for weight in weights.values() if weight.dim() > 1}
    dtype = kinds.pop() if len(kinds) == 1 else torch.float32
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    config.dtype = dtype
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    for name in sorted(shapes.keys() | weights.keys()):
        got = tuple(weights[name].shape) if name in weights else None
        if got != shapes.get(name):
            raise file.fault(
                f"{name}: got {_shape_text(got)}, expected {_shape_text(shapes.get(name))} by its settings"
            )
    return network, weights


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else "x".join(map(str, shape))


def _settings(file: GgufFile, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the model's configuration."""
    scaling = file.setting("rope.scaling.type", "none")
    if scaling != "none":
        raise file.fault(f"scaling of rotary positions {scaling!r}, expected none")
    settings = {key: file.setting(name) for key, name in _CONFIG_KEYS.items()}
    blocks = len({part[1] for part in map(_LAYER_TENSOR.fullmatch, tensors) if part})
    if settings["num_hidden_layers"] != blocks:
        raise file.fault(f"block_count is {settings['num_hidden_layers']}, but it holds {blocks} blocks")
    heads = settings["num_attention_heads"]
    width = file.setting("rope.dimension_count", settings["hidden_size"] // heads)
    settings |= {
        "num_key_value_heads": file.setting("attention.head_count_kv", heads),
        "head_dim": file.setting("attention.key_length", width),
        "rope_parameters": {"rope_type": "default", "rope_theta": file.setting("rope.freq_base", 10_000.0)},
        "vocab_size": int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else 0,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": file.field("tokenizer.ggml.bos_token_id", -1),
        "eos_token_id": file.field("tokenizer.ggml.eos_token_id"),
    }
    if settings["bos_token_id"] < 0:
        settings["bos_token_id"] = None
    if "blk.0.attn_output.bias" in tensors:
        settings["attention_bias"] = True
    return settings


def _named_weights(file: GgufFile, tensors: Mapping[str, Any], config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the weights by their Hugging Face names.

    Raises:
        ConfigError: A tensor has no counterpart.
    """
    for name, tensor in tensors.items():
        part = _LAYER_TENSOR.fullmatch(name)
        target = _OTHER_TENSORS.get(name)
        if part and part[2] in _LAYER_TENSORS:
            target = f"model.layers.{part[1]}.{_LAYER_TENSORS[part[2]]}.{part[3]}"
        if target is None:
            raise file.fault(f"the tensor {name!r} has no place in a {file.architecture}")
        weight = file.read(tensor)
        if part and file.architecture == "llama" and part[2] in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if part[2] == "attn_q" else config.num_key_value_heads
            weight = _halves(weight, heads)
        yield target, weight


def _halves(weight: Any, heads: int) -> Any:
    """Reorder the rows of each head from llama.cpp's adjacent pairs to two halves, as Hugging Face stores them."""
    rows = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def _llama3_rope(file: GgufFile, config: Any, factors: Any) -> dict[str, Any]:
    """Return Llama 3's rotary settings that give ``factors``.

    The file holds only their effect. All published models of Llama 3.1 to 3.3 have the same settings except ``factor``,
    which is the largest of ``factors``.

    Raises:
        ConfigError: The factors result from other settings.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta = config.rope_parameters["rope_theta"]
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config.rope_parameters = rope
    turned, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** -(torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    if not torch.allclose((plain / turned.double()).float(), factors.reshape(-1), rtol=1e-3):
        raise file.fault(f"its factors of rotary frequencies ({_ROPE_FACTORS}) are not those of Llama 3")
    return rope
