"""Soft punishment of responses that run into their length limit."""

from __future__ import annotations

from enum import StrEnum

from afm.rewards.base import Part, Sample

LARGEST_PENALTY = 1.0


class CountedTokens(StrEnum):
    """Whose tokens count towards the length."""

    AGENT = "agent"
    """Sampled tokens only."""
    ALL = "all"
    """Sampled tokens and observations."""


class OverlongPenalty:
    """0 up to the buffer, then linearly down to -1 at the limit and beyond.

    Soft overlong punishment of DAPO (arXiv 2503.14476, equation 13): the length is that of the whole response, observations
    included, and one that did not fit any more. So a response that observations filled is punished like any other.

    Args:
        max_tokens: The length at which the penalty reaches -1.
        buffer_tokens: How many tokens before that it begins.
    """

    def __init__(self, max_tokens: int, buffer_tokens: int, count: CountedTokens = CountedTokens.ALL) -> None:
        self._max = max_tokens
        self._buffer = buffer_tokens
        self._count = count

    async def judge(self, sample: Sample) -> Part:
        """The penalty for the response's length; abstains when the length is unknown."""
        agent = self._count is CountedTokens.AGENT
        length = sample.agent_tokens if agent else sample.response_tokens
        if length is None:
            return Part(None, f"overlong: the number of {'agent' if agent else 'response'} tokens is unknown")
        over = length - (self._max - self._buffer)
        if over <= 0:
            return Part(0.0)
        return Part(
            -LARGEST_PENALTY * min(1.0, over / self._buffer), f"overlong: {length} tokens of {self._max}"
        )

    async def close(self) -> None:
        """Nothing to free."""
