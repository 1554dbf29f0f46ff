"""A Hugging Face tokenizer as episodes need it: exact, nothing added, nothing dropped but end tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from afm.errors import ConfigError, MissingExtraError
from afm.masking import encode_continuation


class ChatTokenizer:
    """Encodes and decodes for one model.

    Args:
        tokenizer: A fast Hugging Face tokenizer with a chat template.
        end_ids: Further ids that end a text, beside the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int] = ()) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"{type(tokenizer).__name__} is a slow tokenizer, expected a fast one "
                "(a folder with tokenizer.json)"
            )
        own = tokenizer.eos_token_id
        self._tokenizer = tokenizer
        self.end_ids = frozenset(end_ids) | (frozenset() if own is None else {own})

    @classmethod
    def load(cls, folder: str | Path) -> ChatTokenizer:
        """Read the tokenizer, and the end tokens in ``generation_config.json`` if there is one.

        Raises:
            ConfigError: The folder holds no usable tokenizer.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise MissingExtraError("transformers", "sft") from None
        if not Path(folder).is_dir():
            raise ConfigError(f"{folder}: no such folder; expected one with tokenizer.json")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: no tokenizer can be loaded from it: {error}") from error
        return cls(tokenizer, generation_end_ids(folder))

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return len(self._tokenizer)

    @property
    def pad_id(self) -> int:
        """The padding token, or any other valid id where there is none."""
        pad = self._tokenizer.pad_token_id
        return 0 if pad is None else int(pad)

    @property
    def end_id(self) -> int:
        """The token that a finished assistant turn ends with.

        Raises:
            ConfigError: The tokenizer has none.
        """
        if not self.end_ids:
            raise ConfigError("the tokenizer has no end-of-sequence token; set eos_token in its config")
        own = self._tokenizer.eos_token_id
        return int(min(self.end_ids) if own is None else own)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` alone, as it continues a text: no blank is put before it."""
        return encode_continuation(self._tokenizer, text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``; end tokens are rendered as nothing, other special tokens as themselves."""
        text: str = self._tokenizer.decode(
            [token for token in token_ids if token not in self.end_ids],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return text

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Chat messages through the template, ready for the assistant to begin.

        Raises:
            ConfigError: The tokenizer has no chat template.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template; expected one, in chat_template.jinja say")
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
        )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def generation_end_ids(folder: str | Path) -> frozenset[int]:
    """End tokens that a model's ``generation_config.json`` names; empty without the file.

    Raises:
        ConfigError: The file cannot be read.
    """
    import json

    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return frozenset()
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
