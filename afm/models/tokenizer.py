"""Tokens and their text: an exact tokenizer, stop strings among tokens, and incremental decoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from afm.errors import ConfigError, MissingExtraError
from afm.masking import encode_continuation
from afm.memory_arithmetic import TOKENIZER_FILES

_UNFINISHED = "\ufffd"
"""Text of a decoder for bytes that are not yet a complete character."""


class ChatTokenizer:
    """An exact Hugging Face tokenizer for episodes. It adds nothing, and drops nothing except end tokens.

    Args:
        tokenizer: A fast Hugging Face tokenizer with a chat template.
        end_ids: Further ids that end a text, in addition to the tokenizer's own.
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
            raise ConfigError(f"{folder}: no such folder; expected one with a tokenizer (tokenizer.json)")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            named = any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)
            why = " ".join(str(error).split()) if named else "no tokenizer.json"
            raise ConfigError(
                f"{folder}: no tokenizer can be loaded from it ({why}); expected a folder with tokenizer.json"
            ) from error
        return cls(tokenizer, generation_end_ids(folder))

    @property
    def backend(self) -> Any:
        """The underlying Hugging Face tokenizer."""
        return self._tokenizer

    @property
    def size(self) -> int:
        """Number of tokens, including added ones."""
        return len(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token. A text of ``n`` characters has at least ``n / longest_token`` tokens."""
        return max(map(len, self._tokenizer.get_vocab()))

    @property
    def pad_id(self) -> int:
        """Id of the padding token, or else any valid id."""
        pad = self._tokenizer.pad_token_id
        return 0 if pad is None else int(pad)

    @property
    def end_id(self) -> int:
        """Id of the token that ends an assistant turn.

        Raises:
            ConfigError: The tokenizer has no such token.
        """
        if not self.end_ids:
            raise ConfigError("the tokenizer has no end-of-sequence token; set eos_token in its config")
        own = self._tokenizer.eos_token_id
        return int(min(self.end_ids) if own is None else own)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` as the continuation of a text, without a leading space."""
        return encode_continuation(self._tokenizer, text)

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of a rendered chat. Nothing is added or cut off.

        They equal those of the tokenizer's ``encode``, which also counts offsets and takes twice the time.
        """
        backend = self._tokenizer.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        [encoded] = backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoded.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``. End tokens are left out, other special tokens are kept."""
        text: str = self._tokenizer.decode(
            [token for token in token_ids if token not in self.end_ids],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return text

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Render chat messages with the template, up to the beginning of the assistant's turn.

        Raises:
            ConfigError: The tokenizer has no chat template.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template; expected one, for example in chat_template.jinja"
            )
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
        )
        return self.encode_rendered(text)


def generation_end_ids(folder: str | Path) -> frozenset[int]:
    """Return the end tokens in a model's ``generation_config.json``. Empty without the file.

    Raises:
        ConfigError: The file cannot be read.
    """
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


class StopMatcher:
    """Finds completed stop strings in a growing list of token ids.

    Only a token whose text contains the last character of a stop string can complete it. So the caller uses
    :meth:`completed` only after these tokens, and it decodes a bounded tail.

    Args:
        decode: Returns the text of token ids.
        vocabulary_size: Ids below it can be decoded.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], vocabulary_size: int) -> None:
        self._decode = decode
        self._vocabulary_size = vocabulary_size
        self._watched: dict[tuple[str, ...], frozenset[int]] = {}

    @cached_property
    def _texts(self) -> list[str]:
        return [self._decode([token]) for token in range(self._vocabulary_size)]

    def watch(self, stop: tuple[str, ...]) -> frozenset[int]:
        """Return the ids that can complete one of ``stop``."""
        if not stop:
            return frozenset()
        if stop not in self._watched:
            last = {text[-1] for text in stop}
            if any(not character.isascii() for character in last):
                last.add(_UNFINISHED)
            self._watched[stop] = frozenset(
                token for token, text in enumerate(self._texts) if not last.isdisjoint(text)
            )
        return self._watched[stop]

    def completed(self, token_ids: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Return whether the last tokens of ``token_ids`` contain one of ``stop``."""
        wanted = max(len(text.encode()) for text in stop)
        begin = len(token_ids)
        while begin and wanted > 0:
            begin -= 1
            # Every token with text has at least one byte. A token without text (an end token) separates nothing.
            wanted -= self._has_text(token_ids[begin])
        tail = self._decode(token_ids[begin:])
        return any(text in tail for text in stop)

    def _has_text(self, token: int) -> bool:
        return token < self._vocabulary_size and bool(self._texts[token])


def first_stop(text: str, stop: Sequence[str]) -> int:
    """Return the offset after the first complete stop string in ``text``, or -1."""
    ends = [at + len(item) for item in stop if (at := text.find(item)) >= 0]
    return min(ends, default=-1)


def stop_length(
    decode: Callable[[Sequence[int]], str],
    token_ids: Sequence[int],
    stop: Sequence[str],
    before: Sequence[int] = (),
) -> int | None:
    """Return the number of ``token_ids`` that complete the first stop string. ``None`` if no stop string is complete.

    The last of these tokens may contain further characters. Bisection finds the number, because a complete stop string
    stays complete.

    Args:
        decode: Returns the text of token ids.
        token_ids: Sampled ids.
        stop: Stop strings.
        before: Preceding tokens, in which a stop string may begin. One that ends in them does not count.
    """
    passed = len(decode(before).rstrip(_UNFINISHED)) if before else 0

    def completed(count: int) -> bool:
        text = decode([*before, *token_ids[:count]])
        return any(text.find(item, max(0, passed + 1 - len(item))) >= 0 for item in stop)

    low, high = 1, len(token_ids)
    if not completed(high):
        return None
    if not completed(high - 1):  # engines usually stop there
        return high
    while low < high:
        middle = (low + high) // 2
        if completed(middle):
            high = middle
        else:
            low = middle + 1
    return low


class IncrementalDecoder:
    """Decodes a growing list of token ids piece by piece.

    A character whose bytes are spread over several tokens is returned once it is complete. All pieces together are the
    text of all tokens.

    Args:
        decode: Returns the text of token ids.
    """

    _CONTEXT = 4
    """Number of tokens that are decoded again before new ones. Some decoders drop the space of a first token."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns the text that is now certain."""
        self._pending += token_ids
        text = self._pending_text()
        if text.endswith(_UNFINISHED):
            return ""
        return self._release(text)

    def finish(self) -> str:
        """Return the rest, with replacement characters for incomplete ones, and start a new text."""
        text = self._release(self._pending_text())
        self._context = []
        return text

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        return self._decode([*self._context, *self._pending])[len(before) :]

    def _release(self, text: str) -> str:
        self._context = [*self._context, *self._pending][-self._CONTEXT :]
        self._pending = []
        return text
