"""The text of an episode as a stream of pieces, each with the role it belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from afm.agents.spec import AgentSpec
from afm.models.streaming import IncrementalDecoder
from afm.rollout.events import OnEvent, TextWritten
from afm.trajectory.stream import StreamParser

_AT_BRACKETS = re.compile(r"(?<=>)|(?=<)")


class LiveText:
    """Turns tokens into :class:`~afm.rollout.events.TextWritten` events.

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
