"""The response while it grows: tokens, masks and text by author, always in step."""

from __future__ import annotations

from collections.abc import Sequence

from afm.models.base import Generation
from afm.trajectory.types import Author, Segment


class Transcript:
    """Collects what was sampled and what was observed, in order, and never rewrites it."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self._texts: list[tuple[Author, list[str]]] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def add_sampled(self, generation: Generation) -> None:
        """Append tokens of the model; absent log-probabilities become 0."""
        count = len(generation.token_ids)
        self.token_ids += generation.token_ids
        self.mask += [1] * count
        self.logprobs += generation.logprobs or [0.0] * count

    def add_observed(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the environment."""
        self.token_ids += token_ids
        self.mask += [0] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)

    def add_text(self, author: Author, text: str) -> None:
        """Append text; neighbours by one author are joined."""
        if not text:
            return
        if not self._texts or self._texts[-1][0] is not author:
            self._texts.append((author, []))
        self._texts[-1][1].append(text)

    @property
    def agent_tokens(self) -> int:
        """Sampled tokens so far."""
        return sum(self.mask)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The text so far, by author."""
        return tuple(Segment(author, "".join(parts)) for author, parts in self._texts)
