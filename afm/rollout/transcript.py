"""One episode: its growing transcript, its events, its result with every token, and its record on disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from afm.agents.spec import AgentSpec
from afm.errors import EngineError
from afm.models.base import Generation
from afm.models.tokenizer import IncrementalDecoder
from afm.trajectory.record import CallRecord, Cost, Record, StopReason, Verdict
from afm.trajectory.tags import Author, Segment, StreamParser


@dataclass(frozen=True, slots=True)
class TextWritten:
    """The agent or the environment wrote a piece of text or a tag. ``role`` is ``None`` between roles."""

    text: str
    role: str | None
    by_agent: bool = True


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool starts to work."""

    role: str
    tool: str
    argument: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A tool has finished, or the call was a repeated one."""

    call: CallRecord


@dataclass(frozen=True, slots=True)
class Stopped:
    """The episode has ended."""

    reason: StopReason


EpisodeEvent = TextWritten | CallStarted | CallFinished | Stopped
OnEvent = Callable[[EpisodeEvent], None]


@dataclass(frozen=True, slots=True)
class Episode:
    """Everything from the prompt to the end of the response.

    Attributes:
        prompt_ids: Token ids of the prompt, length P.
        response_ids: Sampled and observed ids in order, length R. After ``prompt_ids`` they are exactly what the model
            saw. Nothing is ever tokenized again.
        response_mask: Length R. 1 if the model sampled the token, 0 if the environment wrote it.
        logprobs: Length R. The log-probability of sampling where the mask is 1, else 0.0.
        segments: The same response as text by author.
        calls: Tool calls in order.
        stop: Why the episode ended.
        unfit_tokens: Length of the observation that ended the episode because it did not fit. No other field contains it.
        protocol: Facts about a protocol other than ours, which may have trimmed the history or added an answer.
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
        """Tokens of the response, including those of an observation that did not fit."""
        return len(self.response_ids) + self.unfit_tokens

    @property
    def text(self) -> str:
        """The whole response, including observations."""
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
    """Return one line of an episodes file. See :class:`~afm.trajectory.record.Record` for its fields.

    ``with_tokens`` keeps token ids, mask and log-probabilities.
    """
    protocol = {"protocol": dict(episode.protocol)} if episode.protocol else {}
    return Record(
        id=id,
        agent=spec.name,
        agent_digest=spec.digest,
        question=question,
        segments=episode.segments,
        ground_truth=ground_truth,
        data_source=data_source,
        model=model,
        seed=seed,
        stop=episode.stop,
        verdict=verdict,
        cost=episode.cost,
        calls=episode.calls,
        provenance=dict(provenance or {}) | protocol,
        prompt_ids=episode.prompt_ids if with_tokens else None,
        response_ids=episode.response_ids if with_tokens else None,
        response_mask=episode.response_mask if with_tokens else None,
        logprobs=episode.logprobs or None if with_tokens else None,
    )


class Transcript:
    """Collects sampled and observed tokens. Nothing is ever tokenized again."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decoder = IncrementalDecoder(decode)
        self._agent_text: list[str] = []
        self._segments: list[Segment] = []
        self._with_logprobs = True
        self.ids: list[int] = []
        self.mask: list[int] = []
        self._logprobs: list[float] = []
        self.agent_tokens = 0
        self.turn_tokens = 0

    @property
    def logprobs(self) -> tuple[float, ...]:
        """One log-probability per token, 0.0 for observed ones. Empty if the model does not report them."""
        return tuple(self._logprobs) if self._with_logprobs else ()

    def add_generation(self, generation: Generation) -> str:
        """Append a generation and return its text up to the last complete character.

        Raises:
            EngineError: The model returned log-probabilities for only some of its tokens.
        """
        count = len(generation.token_ids)
        if len(generation.logprobs) == count:
            self._logprobs += generation.logprobs
        elif generation.logprobs:
            raise EngineError(
                f"the model returned {count} tokens with {len(generation.logprobs)} log-probabilities; "
                "expected one per token or none at all"
            )
        else:
            self._with_logprobs = False
        self.ids += generation.token_ids
        self.mask += [1] * count
        self.agent_tokens += count
        self.turn_tokens += count
        text = self._decoder.feed(generation.token_ids)
        self._agent_text.append(text)
        return text

    def add_observation(self, token_ids: Sequence[int], text: str) -> None:
        """Append an observation of the environment."""
        self._add_unsampled(token_ids, Segment(Author.ENVIRONMENT, text))

    def add_adopted(self, token_ids: Sequence[int], text: str) -> None:
        """Append text that the agent wrote in another place. It counts as the agent's text, but not as sampled."""
        self._add_unsampled(token_ids, Segment(Author.AGENT, text))

    @property
    def last_text(self) -> str:
        """The text of the last finished segment."""
        return self._segments[-1].text if self._segments else ""

    def _add_unsampled(self, token_ids: Sequence[int], segment: Segment) -> None:
        self.end_segment()
        self._segments.append(segment)
        self.ids += token_ids
        self.mask += [0] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
        self.turn_tokens = 0

    def segments(self) -> tuple[Segment, ...]:
        """Return the finished response as text by author. An incomplete character becomes a replacement character."""
        self.end_segment()
        return tuple(self._segments)

    def end_segment(self, author: Author = Author.AGENT) -> None:
        """End the segment of the agent's text. ``author`` is the environment if it only quotes the agent."""
        text = "".join(self._agent_text) + self._decoder.finish()
        self._agent_text.clear()
        if text:
            self._segments.append(Segment(author, text))


_AT_BRACKETS = re.compile(r"(?<=>)|(?=<)")


class LiveText:
    """Turns tokens into :class:`TextWritten` events.

    It has its own parser, because the loop parses whole generations and a viewer every token.
    """

    def __init__(self, spec: AgentSpec, decode: Callable[[Sequence[int]], str], on_event: OnEvent) -> None:
        self._spec = spec
        self._decoder = IncrementalDecoder(decode)
        self._parser = StreamParser(spec)
        self._on_event = on_event
        self._held = ""

    def add_token(self, token: int) -> None:
        """Show one sampled token."""
        self.add_tokens([token])

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Show sampled tokens. Text that may be the beginning of a tag waits for the end of the tag."""
        self._show(self._decoder.feed(token_ids))

    def add_observation(self, text: str) -> None:
        """Show an observation."""
        self.finish()
        self._parser.feed_observation(text)
        self._on_event(TextWritten(text, self._spec.observation_role, by_agent=False))

    def finish(self) -> None:
        """Show the text that was held back."""
        rest = self._held + self._decoder.finish()
        self._held = ""
        self._show(rest, final=True)

    def _show(self, text: str, *, final: bool = False) -> None:
        *pieces, last = _AT_BRACKETS.split(self._held + text)
        self._held = last if self._may_become_tag(last) and not final else ""
        if not self._held:
            pieces.append(last)
        for piece in pieces:
            before = self._parser.open_role
            self._parser.feed(piece)
            if piece:
                self._on_event(TextWritten(piece, self._parser.open_role or before))

    def _may_become_tag(self, text: str) -> bool:
        longest = max(map(len, self._spec.roles)) + 3
        return text.startswith("<") and not text.endswith(">") and len(text) < longest
