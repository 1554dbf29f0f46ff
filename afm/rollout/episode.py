"""One episode: its result token for token, its events while it runs, and its record on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from afm.agents.spec import AgentSpec
from afm.trajectory.record import CallRecord, Cost, Record, StopReason, TextSegment, Verdict
from afm.trajectory.types import Segment


@dataclass(frozen=True, slots=True)
class TextWritten:
    """The agent or the environment wrote a piece of text.

    Attributes:
        text: The piece; tags come as pieces of their own.
        role: The role it belongs to, ``None`` between roles.
        by_agent: False for an observation.
    """

    text: str
    role: str | None
    by_agent: bool = True


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool begins to work."""

    role: str
    tool: str
    argument: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A tool is done, or the call was a repeated one."""

    call: CallRecord


@dataclass(frozen=True, slots=True)
class Stopped:
    """The episode is over."""

    reason: StopReason


EpisodeEvent = TextWritten | CallStarted | CallFinished | Stopped
OnEvent = Callable[[EpisodeEvent], None]


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


def episode_record(
    episode: Episode,
    spec: AgentSpec,
    *,
    id: str,  # noqa: A002 - the record's own word
    question: str,
    ground_truth: Any = None,
    data_source: str = "",
    model: str = "",
    seed: int | None = None,
    verdict: Verdict | None = None,
    provenance: Mapping[str, Any] | None = None,
    with_tokens: bool = True,
) -> Record:
    """One line of an episodes file.

    Args:
        episode: What happened.
        spec: The agent it happened with.
        id: Unique in the file.
        question: What was asked.
        ground_truth: What the reward compared with.
        data_source: Where the question comes from.
        model: Name of the model.
        seed: Seed of the episode.
        verdict: What the reward says, if it was asked.
        provenance: How this line came about.
        with_tokens: Keep token ids, mask and log-probabilities.
    """
    tokens: dict[str, Any] = {}
    if with_tokens:
        tokens = {
            "prompt_ids": episode.prompt_ids,
            "response_ids": episode.response_ids,
            "response_mask": episode.response_mask,
            "logprobs": episode.logprobs or None,
        }
    return Record(
        id=id,
        agent=spec.name,
        agent_digest=spec.digest,
        question=question,
        segments=tuple(TextSegment(author=part.author, text=part.text) for part in episode.segments),
        ground_truth=ground_truth,
        data_source=data_source,
        model=model,
        seed=seed,
        stop=episode.stop,
        verdict=verdict,
        cost=episode.cost,
        calls=episode.calls,
        provenance=dict(provenance or {})
        | ({"protocol": dict(episode.protocol)} if episode.protocol else {}),
        **tokens,
    )
