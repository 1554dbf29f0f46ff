"""A GGUF file that has been opened: its fields, vocabulary and tensors."""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from afm.errors import ConfigError, MissingExtraError

_ARCHITECTURES = ("llama", "qwen2", "qwen3")


class TokenType(IntEnum):
    """What a token is to a GGUF file; its other types are bytes and unknown words, which byte-level BPE lacks."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


class GgufFile:
    """A GGUF file that has been opened: its fields and tensors.

    Raises:
        ConfigError: It is no GGUF file, or of another architecture.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise MissingExtraError("gguf", "gguf") from None
        self.path = path
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; expected a GGUF file")
        try:
            self._reader = GGUFReader(str(path))
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ConfigError(
                f"{path}: no readable GGUF file: {error}; download or convert it again"
            ) from error
        self.architecture = str(self.field("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise self.fault(f"architecture {self.architecture!r}, expected {', '.join(_ARCHITECTURES)}")

    def fault(self, text: str) -> ConfigError:
        """An error that names the file, and what can be done for every file."""
        return ConfigError(f"{self.path}: {text}; use the model's Hugging Face folder instead")

    def field(self, key: str, default: Any = None) -> Any:
        """Value of ``key``.

        Raises:
            ConfigError: The file lacks it, and there is no default.
        """
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise self.fault(f"{key} is missing")
        return default

    def setting(self, key: str, default: Any = None) -> Any:
        """Value of ``key`` below the architecture's name."""
        return self.field(f"{self.architecture}.{key}", default)

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary, in the order of ids."""
        return list(self.field("tokenizer.ggml.tokens"))

    @cached_property
    def token_types(self) -> list[int]:
        """Type of each token."""
        types = list(self.field("tokenizer.ggml.token_type"))
        if len(types) != len(self.tokens):
            raise self.fault(f"{len(self.tokens)} tokens, but {len(types)} token types")
        return types

    def token(self, name: str) -> str | None:
        """The token that the file names as its ``bos``, ``eos`` or ``padding``."""
        number = int(self.field(f"tokenizer.ggml.{name}_token_id", -1))
        if number >= len(self.tokens):
            raise self.fault(f"{name} token {number} of {len(self.tokens)}")
        return self.tokens[number] if number >= 0 else None

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end a turn or a message."""
        ids = (int(self.field(f"tokenizer.ggml.{name}_token_id", -1)) for name in ("eos", "eot", "eom"))
        return [number for number in ids if number >= 0]

    @property
    def tensors(self) -> dict[str, Any]:
        """Tensors by their names."""
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def read(self, tensor: Any) -> Any:
        """Values of a tensor: bfloat16 as stored, anything else as float32."""
        import torch
        from gguf import GGMLQuantizationType, dequantize

        if tensor.tensor_type == GGMLQuantizationType.BF16:
            shape = [int(size) for size in reversed(tensor.shape)]
            return torch.from_numpy(tensor.data.copy()).view(torch.bfloat16).reshape(shape)
        try:
            return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        except NotImplementedError as error:
            raise self.fault(f"{tensor.name}: {error}") from None
