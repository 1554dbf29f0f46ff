"""The response of one episode while it grows: tokens, mask, log-probabilities, text by author, and its live view."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from afm.agents.spec import AgentSpec
from afm.errors import EngineError
from afm.models.base import Generation
from afm.models.streaming import IncrementalDecoder
from afm.rollout.episode import OnEvent, TextWritten
from afm.trajectory.tags import StreamParser
from afm.trajectory.types import Author, Segment


class Transcript:
    """Appends what was sampled and what was observed; nothing is ever tokenized again.

    Args:
        decode: Text of token ids.
    """

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
        """One for each token, 0.0 for observed ones; empty when the model reports none."""
        return tuple(self._logprobs) if self._with_logprobs else ()

    def add_generation(self, generation: Generation) -> str:
        """Append what the model sampled; returns its text as far as its characters are whole.

        Raises:
            EngineError: The model returned log-probabilities for some of its tokens only.
        """
        count = len(generation.token_ids)
        if len(generation.logprobs) == count:
            self._logprobs += generation.logprobs
        elif generation.logprobs:
            raise EngineError(
                f"the model returned {count} tokens with {len(generation.logprobs)} log-probabilities; "
                "expected one for each token, or none at all"
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
        """Append what the environment wrote."""
        self._add_unsampled(token_ids, Segment(Author.ENVIRONMENT, text))

    def add_adopted(self, token_ids: Sequence[int], text: str) -> None:
        """Append words of the agent in another place than it wrote them: its text, not its samples."""
        self._add_unsampled(token_ids, Segment(Author.AGENT, text))

    def end_segment(self, author: Author = Author.AGENT) -> None:
        """End what the agent wrote since the last segment; ``author`` is the environment where it only quotes the agent."""
        self._close_agent_segment(author)

    @property
    def last_text(self) -> str:
        """Text of the last finished segment."""
        return self._segments[-1].text if self._segments else ""

    def _add_unsampled(self, token_ids: Sequence[int], segment: Segment) -> None:
        self._close_agent_segment()
        self._segments.append(segment)
        self.ids += token_ids
        self.mask += [0] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
        self.turn_tokens = 0

    def segments(self) -> tuple[Segment, ...]:
        """The finished response as text by author; a character cut in half becomes a replacement character."""
        self._close_agent_segment()
        return tuple(self._segments)

    def _close_agent_segment(self, author: Author = Author.AGENT) -> None:
        text = "".join(self._agent_text) + self._decoder.finish()
        self._agent_text.clear()
        if text:
            self._segments.append(Segment(author, text))


_AT_BRACKETS = re.compile(r"(?<=>)|(?=<)")


class LiveText:
    """Turns tokens into :class:`~afm.rollout.episode.TextWritten` events.

    Keeps a parser of its own: the loop looks at a generation as a whole, a viewer at every token.
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
        """Show sampled tokens; what may be the beginning of a tag waits for its end."""
        self._show(self._decoder.feed(token_ids))

    def add_observation(self, text: str) -> None:
        """Show what the environment appended."""
        self.finish()
        self._parser.feed_observation(text)
        self._on_event(TextWritten(text, self._spec.observation_role, by_agent=False))

    def finish(self) -> None:
        """Show what was held back."""
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
