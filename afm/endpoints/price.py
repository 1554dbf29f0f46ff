"""What tokens cost."""

from __future__ import annotations

from pydantic import Field

from afm.configuration import Settings

MAX_USD = 1e9
"""A larger price is a mistake."""
MILLION = 1e6


class TokenPrice(Settings):
    """US dollars for a million tokens."""

    prompt: float = Field(ge=0, le=MAX_USD)
    completion: float = Field(ge=0, le=MAX_USD)

    def usd(self, prompt_tokens: int, completion_tokens: int) -> float:
        """What so many tokens cost."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / MILLION


class CachedTokenPrice(TokenPrice):
    """US dollars for a million tokens at an endpoint that keeps prompts in a cache.

    Attributes:
        cached: For tokens of the prompt that were in the cache; as ``prompt`` when ``None``.
    """

    cached: float | None = Field(default=None, ge=0, le=MAX_USD)

    def usd(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        """What so many tokens cost; ``cached_tokens`` are part of the prompt's."""
        cached = min(cached_tokens, prompt_tokens)
        cached_price = self.prompt if self.cached is None else self.cached
        spent = (prompt_tokens - cached) * self.prompt + cached * cached_price
        return (spent + completion_tokens * self.completion) / MILLION
