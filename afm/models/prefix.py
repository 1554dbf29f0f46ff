"""States of finished rows, kept because an episode usually goes on from where it stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    States = list[tuple[Tensor, Tensor]]
    """Keys and values of each layer, of shape [heads, tokens, head size]."""


class PrefixStore:
    """The most recently finished rows, up to a number of tokens in all.

    Args:
        max_tokens: Older rows make room for newer ones; 0 keeps nothing.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._states: dict[tuple[int, ...], States] = {}
        self._lengths: Counter[int] = Counter()
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens kept."""
        return self._tokens

    def put(self, token_ids: tuple[int, ...], states: States) -> None:
        """Keep the states of ``token_ids``."""
        if not 0 < len(token_ids) <= self._max_tokens:
            return
        self._drop(token_ids)
        self._states[token_ids] = states
        self._lengths[len(token_ids)] += 1
        self._tokens += len(token_ids)
        while self._tokens > self._max_tokens:
            self._drop(next(iter(self._states)))

    def take(self, prompt_ids: Sequence[int]) -> tuple[int, States]:
        """Remove and return the longest kept beginning of ``prompt_ids``: its length, 0 for none, and states."""
        for length in sorted(self._lengths, reverse=True):
            if length <= len(prompt_ids):
                key = tuple(prompt_ids[:length])
                if key in self._states:
                    return length, self._drop(key)
        return 0, []

    def clear(self) -> None:
        """Forget everything, as must be when weights change."""
        self._states.clear()
        self._lengths.clear()
        self._tokens = 0

    def _drop(self, key: tuple[int, ...]) -> States:
        states = self._states.pop(key, [])
        if states:
            self._tokens -= len(key)
            self._lengths[len(key)] -= 1
            self._lengths += Counter()  # forgets lengths that do not occur any more
        return states
