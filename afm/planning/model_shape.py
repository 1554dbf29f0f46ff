"""The shape of a dense decoder: what its parameters, memory and arithmetic follow from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.errors import ConfigError

LAYER_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the size of a dense decoder (Llama, Qwen2, Qwen3) follows from."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    qkv_bias: bool
    head_norms: bool
    max_positions: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear modules of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        shapes += [(self.hidden, self.mlp), (self.hidden, self.mlp), (self.mlp, self.hidden)]
        return dict(zip(LAYER_MODULES, shapes, strict=True))

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        layer = sum(inputs * outputs for inputs, outputs in self.linears.values()) + 2 * self.hidden
        layer += (
            self.heads + 2 * self.kv_heads
        ) * self.head_dim * self.qkv_bias + 2 * self.head_dim * self.head_norms
        return self.layers * layer + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, the largest single module."""
        return self.vocab * self.hidden

    def adapters(self, rank: int, targets: str) -> int:
        """Parameters of LoRA adapters of ``rank`` on ``targets`` (``all``, or module names with commas)."""
        names = LAYER_MODULES if targets == "all" else [name.strip() for name in targets.split(",")]
        linears = self.linears
        return self.layers * sum(rank * sum(linears[name]) for name in names if name in linears)


def missing_model_files(folder: Path) -> list[str]:
    """What a model's folder lacks of configuration, weights and tokenizer."""
    needed = {"config.json": "config.json", "*.safetensors": "weights", "tokenizer.json": "tokenizer"}
    return [f"{name} ({file})" for file, name in needed.items() if not any(folder.glob(file))]


def model_shape(name_or_folder: str) -> ModelShape | None:
    """Shape of a model in a folder, or by its name of a Qwen2.5 of 3B, 7B or 32B or Llama-2 of 7B; else ``None``.

    Raises:
        ConfigError: The folder's ``config.json`` is broken.
    """
    file = Path(name_or_folder).expanduser() / "config.json"
    if file.is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: no JSON: {error}; copy the model again") from None
        if not isinstance(config, dict):
            raise ConfigError(
                f"{file}: got {type(config).__name__}, expected a model's settings as a JSON object"
            )
        return _shape_of(config)
    if re.fullmatch(r"meta-llama/Llama-2-7b(?:-chat)?-hf", name_or_folder):
        return _LLAMA_2_7B
    known = re.fullmatch(r"Qwen/Qwen2\.5-(?:Coder-)?(3|7|32)B(?:-Instruct)?", name_or_folder)
    return _QWEN[known[1]] if known else None


def _shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if any(not isinstance(config.get(key), int) for key in needed) or config.get("num_experts"):
        return None
    kind = str(config.get("model_type"))
    heads = config["num_attention_heads"]
    return ModelShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        mlp=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        head_norms=kind == "qwen3",
        max_positions=int(config.get("max_position_embeddings") or 0),
    )


def _qwen(
    hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool
) -> ModelShape:
    return ModelShape(hidden, layers, heads, kv_heads, 128, mlp, vocab, tied, True, False, 32768)


_QWEN = {
    "3": _qwen(2048, 36, 16, 2, 11008, 151936, True),
    "7": _qwen(3584, 28, 28, 4, 18944, 152064, False),
    "32": _qwen(5120, 64, 40, 8, 27648, 152064, False),
}
_LLAMA_2_7B = ModelShape(4096, 32, 32, 32, 128, 11008, 32000, False, False, False, 4096)
