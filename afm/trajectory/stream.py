"""Steps as they are written, for a model that is still generating."""

from __future__ import annotations

from dataclasses import dataclass

from afm.agents.spec import AgentSpec
from afm.trajectory.parse import opening_pattern
from afm.trajectory.types import Step


@dataclass(frozen=True, slots=True)
class StepOpened:
    """An opening tag was completed."""

    role: str


@dataclass(frozen=True, slots=True)
class StepClosed:
    """A closing tag was completed; ``step`` has offsets into everything fed so far."""

    step: Step


StreamEvent = StepOpened | StepClosed


class StreamParser:
    """Finds steps in text that arrives in pieces.

    The events depend on the text only, not on how it was cut, and the steps are those of
    :func:`afm.trajectory.parse.split`. Work and memory are linear in the text, piece by piece: what was
    looked at once is put aside, but for the few characters that may begin a tag.
    """

    def __init__(self, spec: AgentSpec) -> None:
        self._opening = opening_pattern(tuple(spec.roles))
        self._longest_tag = max(map(len, spec.roles)) + 2
        self._pieces: list[str] = []
        self._window = ""
        self._position = 0
        self._role: str | None = None
        self._start = 0
        self._prefix = ""

    @property
    def open_role(self) -> str | None:
        """The role that is being written now, ``None`` between steps."""
        return self._role

    @property
    def position(self) -> int:
        """Characters fed so far."""
        return self._position + len(self._window)

    def feed(self, text: str) -> list[StreamEvent]:
        """Take the agent's next piece of text and report what it completed, in order."""
        self._window += text
        events: list[StreamEvent] = []
        while True:
            event = self._find_opening() if self._role is None else self._find_closing(self._role)
            if event is None:
                return events
            events.append(event)

    def feed_observation(self, text: str) -> list[StreamEvent]:
        """Take what the environment appended between two steps.

        Raises:
            ValueError: A role of the agent is still open, so this would become its content.
        """
        if self._role is not None:
            raise ValueError(f"an observation cannot be added while <{self._role}> is open")
        self._put_aside(len(self._window))
        return self.feed(text)

    def _find_opening(self) -> StepOpened | None:
        match = self._opening.search(self._window)
        if match is None:
            bracket = self._window.rfind("<", -self._longest_tag + 1)
            self._put_aside(len(self._window) if bracket < 0 else bracket)
            return None
        self._start = self._position + match.start()
        self._put_aside(match.start())
        self._prefix = self._collect()
        self._drop(len(match[0]))
        self._role = match[1]
        return StepOpened(match[1])

    def _find_closing(self, role: str) -> StepClosed | None:
        closing = f"</{role}>"
        at = self._window.find(closing)
        if at < 0:
            self._put_aside(max(0, len(self._window) - len(closing) + 1))
            return None
        self._put_aside(at)
        content = self._collect()
        self._drop(len(closing))
        self._role = None
        return StepClosed(Step(role, content, self._prefix, self._start, self._position))

    def _put_aside(self, length: int) -> None:
        if length:
            self._pieces.append(self._window[:length])
            self._drop(length)

    def _drop(self, length: int) -> None:
        self._window = self._window[length:]
        self._position += length

    def _collect(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        return text
