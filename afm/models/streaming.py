"""What a model may offer beyond :class:`afm.models.base.TokenModel`: its tokens while they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from afm.models.base import Generation, SamplingParams


@runtime_checkable
class StreamingModel(Protocol):
    """A model that can show its tokens one by one. The result is that of ``generate``."""

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_token: Callable[[int], None]
    ) -> Generation:
        """As ``generate``; ``on_token`` is called in the same event loop, before this returns."""
        ...


class IncrementalDecoder:
    """Text of a growing list of token ids, piece by piece.

    A character whose bytes are spread over tokens comes out once it is whole. All pieces together are the
    text of all tokens together.

    Args:
        decode: Text of token ids.
    """

    _CONTEXT = 4
    """Tokens decoded again in front of new ones: some decoders drop the blank of a first token."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; returns the text that is now certain."""
        self._pending += token_ids
        text = self._pending_text()
        if text.endswith("\ufffd"):
            return ""
        return self._release(text)

    def finish(self) -> str:
        """The rest, unfinished characters as replacement characters; what is fed next begins anew."""
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
