"""Text to token ids and back: what every model leaves to its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Codec(Protocol):
    """A tokenizer as models need it; ``decode(encode(text)) == text``."""

    @property
    def end_id(self) -> int:
        """The end-of-sequence token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` alone, without special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, end-of-sequence tokens rendered as nothing."""
        ...

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Chat messages through the model's template, ready for the assistant to begin."""
        ...


class CodecModel:
    """Base of models: name, context and everything that the codec does; generating is left to them.

    Args:
        codec: The model's tokenizer.
        name: Identifies the model in records.
        context_tokens: Prompt and response together may not exceed this.

    Attributes:
        cancellable: Whether cancelling ``generate`` ends the generation. An engine in this process drops its row; a server
            notices the closed connection.
    """

    cancellable = True
    token_exact: bool = True

    def __init__(self, codec: Codec, *, name: str, context_tokens: int) -> None:
        self._codec = codec
        self._name = name
        self._context_tokens = context_tokens

    @property
    def name(self) -> str:
        """Identifies the model in records."""
        return self._name

    @property
    def context_tokens(self) -> int:
        """Prompt and response together may not exceed this."""
        return self._context_tokens

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` alone."""
        return self._codec.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, end-of-sequence tokens rendered as nothing."""
        return self._codec.decode(token_ids)

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Chat messages through the model's template, ready for the assistant to begin."""
        return self._codec.encode_prompt(messages)
