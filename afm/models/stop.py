"""Recognise the token that completes a stop string, at a cost independent of the text's length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

_UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no whole character yet."""


class StopMatcher:
    """Finds completed stop strings in a growing list of token ids.

    Only a token whose text contains the last character of a stop string can complete it, so the caller
    asks :meth:`completed` after such tokens alone; the question then decodes a bounded tail.

    Args:
        decode: Text of token ids.
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
        """Ids that can complete one of ``stop``."""
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
        """Whether the last tokens of ``token_ids`` contain one of ``stop``."""
        wanted = max(len(text.encode()) for text in stop)
        begin = len(token_ids)
        while begin and wanted > 0:
            begin -= 1
            # Every token with a text carries a byte at least; one without (an end token) separates nothing.
            wanted -= self._has_text(token_ids[begin])
        tail = self._decode(token_ids[begin:])
        return any(text in tail for text in stop)

    def _has_text(self, token: int) -> bool:
        return token < self._vocabulary_size and bool(self._texts[token])


def first_stop(text: str, stop: Sequence[str]) -> int:
    """Offset just behind the stop string that is completed first in ``text``, -1 when there is none."""
    ends = [at + len(item) for item in stop if (at := text.find(item)) >= 0]
    return min(ends, default=-1)


def stop_length(
    decode: Callable[[Sequence[int]], str],
    token_ids: Sequence[int],
    stop: Sequence[str],
    before: Sequence[int] = (),
) -> int | None:
    """How many of ``token_ids`` it takes to complete the first stop string; ``None`` when none is completed.

    The last of them may carry characters beyond it. Found by halving: a stop string that is there stays there.

    Args:
        decode: Text of token ids.
        token_ids: What was sampled.
        stop: Any of these counts.
        before: Tokens in front of them, in which a stop string may begin; those that end in them do not count.
    """
    passed = len(decode(before).rstrip(_UNFINISHED)) if before else 0

    def completed(count: int) -> bool:
        text = decode([*before, *token_ids[:count]])
        return any(text.find(item, max(0, passed + 1 - len(item))) >= 0 for item in stop)

    low, high = 1, len(token_ids)
    if not completed(high):
        return None
    if not completed(high - 1):  # engines stop there, as a rule
        return high
    while low < high:
        middle = (low + high) // 2
        if completed(middle):
            high = middle
        else:
            low = middle + 1
    return low
