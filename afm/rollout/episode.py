"""The result of one episode, token-exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from afm.trajectory.record import CallRecord, Cost, StopReason
from afm.trajectory.types import Segment


@dataclass(frozen=True, slots=True)
class Episode:
    """Everything that happened between a prompt and the end of the response.

    Attributes:
        prompt_ids: Token ids the model was given, length P.
        response_ids: Sampled and observed ids in order, length R. Concatenated to ``prompt_ids`` they are
            exactly what the model saw; nothing is ever re-tokenized.
        response_mask: Length R; 1 where the model sampled the token, 0 where the environment wrote it.
        logprobs: Length R; the sampling log-probability where the mask is 1, else 0.0.
        segments: The same response as text by author.
        calls: Tool calls in order.
        stop: Why it ended.
        unfit_tokens: Length of the observation that ended it, because the response had no room for it; it is in nothing above.
        protocol: What a protocol other than ours did: it may have shown the model a trimmed history, and have added an answer.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    calls: tuple[CallRecord, ...]
    stop: StopReason
    cost: Cost
    unfit_tokens: int = 0
    protocol: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens that the response came to, those of an observation that did not fit included."""
        return len(self.response_ids) + self.unfit_tokens

    @property
    def text(self) -> str:
        """The whole response, observations included."""
        return "".join(segment.text for segment in self.segments)
