"""The result of one episode, token-exact."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    calls: tuple[CallRecord, ...]
    stop: StopReason
    cost: Cost

    @property
    def text(self) -> str:
        """The whole response, observations included."""
        return "".join(segment.text for segment in self.segments)
