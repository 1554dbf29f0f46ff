"""The response of one episode while it grows: tokens, mask, log-probabilities and text by author."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from afm.errors import EngineError
from afm.models.base import Generation
from afm.models.streaming import IncrementalDecoder
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
