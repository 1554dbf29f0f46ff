"""Text of tokens that arrive in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"
_WINDOW = 8


class IncrementalDecoder:
    """Decodes token ids piece by piece; a character split over tokens is held back until it is whole.

    A few decoded ids are kept as context, so that tokenizers which treat the first token of a text
    differently give the same text as for the whole sequence.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` complete."""
        self._pending += token_ids
        text = self._text()
        if text.endswith(_UNFINISHED):
            return ""
        self._settle()
        return text

    def flush(self) -> str:
        """What was held back; bytes that are no character come out as U+FFFD."""
        text = self._text()
        self._settle()
        return text

    def _text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :] if self._pending else ""

    def _settle(self) -> None:
        self._context = (self._context + self._pending)[-_WINDOW:]
        self._pending = []
