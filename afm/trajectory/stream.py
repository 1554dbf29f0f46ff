"""Steps as they are written, for a model that is still generating."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO

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
        self._seen = StringIO()
        self._carry = ""
        self._carry_at = 0
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
        return self._carry_at + len(self._carry)

    def feed(self, text: str) -> list[StreamEvent]:
        """Take the agent's next piece of text and report what it completed, in order."""
        window = self._carry + text
        events: list[StreamEvent] = []
        at = 0
        while True:
            found = self._open(window, at) if self._role is None else self._close(window, at, self._role)
            if found is None:
                break
            event, at = found
            events.append(event)
        keep = self._undecided_from(window, at)
        self._seen.write(window[at:keep])
        self._carry = window[keep:]
        self._carry_at += keep
        return events

    def feed_observation(self, text: str) -> list[StreamEvent]:
        """Take what the environment appended between two steps.

        Raises:
            ValueError: A role of the agent is still open, so this would become its content.
        """
        if self._role is not None:
            raise ValueError(f"an observation cannot be added while <{self._role}> is open")
        self._seen.write(self._carry)
        self._carry_at += len(self._carry)
        self._carry = ""
        return self.feed(text)

    def _open(self, window: str, at: int) -> tuple[StreamEvent, int] | None:
        match = self._opening.search(window, at)
        if match is None:
            return None
        self._role = match[1]
        self._start = self._carry_at + match.start()
        self._prefix = self._seen_until(window[at : match.start()])
        return StepOpened(match[1]), match.end()

    def _close(self, window: str, at: int, role: str) -> tuple[StreamEvent, int] | None:
        closing = f"</{role}>"
        begin = window.find(closing, at)
        if begin < 0:
            return None
        self._role = None
        end = begin + len(closing)
        content = self._seen_until(window[at:begin])
        return StepClosed(Step(role, content, self._prefix, self._start, self._carry_at + end)), end

    def _undecided_from(self, window: str, at: int) -> int:
        """Offset from which ``window`` may still become a tag that matters now."""
        longest = self._longest_tag if self._role is None else len(self._role) + 3
        bracket = window.rfind("<", max(at, len(window) - longest + 1))
        return len(window) if bracket < 0 else bracket

    def _seen_until(self, last: str) -> str:
        self._seen.write(last)
        text = self._seen.getvalue()
        self._seen.seek(0)
        self._seen.truncate()
        return text
