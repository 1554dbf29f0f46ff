"""The steps of a trajectory while a team's events go by: small breaks of the agent's order are repaired and counted.

A repair leaves every word of a member where it was said. Thoughts in a row become one, and so does a function that is
written twice in a row. A message that repeats the one before goes. A thought goes where the order forbids it; a missing
one is made from the purpose of the step. Messages that the role map calls optional go where the order forbids them.
Anything else is left for the validator to refuse.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from afm.agents import AgentSpec, RoleKind
from afm.agents.spec import START
from afm.trajectory import render
from afm.trajectory.tags import Author, Segment, Step, Trajectory

_GAP = "\n\n"


class Repair(StrEnum):
    """What was repaired."""

    JOINED_THOUGHTS = "joined thoughts"
    JOINED_MESSAGES = "joined messages"
    REPEATED_MESSAGE = "repeated message"
    DROPPED_THOUGHT = "dropped thought"
    DROPPED_MESSAGE = "dropped message"
    MISSING_THOUGHT = "missing thought"


@dataclass(slots=True)
class StepSource:
    """Where a step came from: the member and the event, and events that were joined to it."""

    role: str
    agent: str
    event: str
    also: list[str] = field(default_factory=list)
    repair: str = ""

    def dumped(self) -> dict[str, Any]:
        """As a record's provenance has it."""
        row: dict[str, Any] = {"role": self.role, "agent": self.agent, "event": self.event}
        if self.also:
            row["also"] = self.also
        if self.repair:
            row["repair"] = self.repair
        return row


@dataclass(slots=True)
class _DraftStep:
    """A step of the agent, or the whole text that the environment appended."""

    source: StepSource
    content: str
    environment: bool = False


class Steps:
    """The steps of one trajectory in the order of their events.

    Attributes:
        repairs: How often each kind of repair was made.
    """

    def __init__(self, spec: AgentSpec) -> None:
        self.repairs: Counter[str] = Counter()
        self._spec = spec
        self._items: list[_DraftStep] = []

    def write(
        self, source: StepSource, content: str, *, missing_thought: str = "", optional: bool = False
    ) -> None:
        """Add what a member wrote.

        Args:
            missing_thought: Stands in for a thought that the role needs and lacks.
            optional: Whether it is left out where the agent's order forbids it.
        """
        role = self._spec.roles[source.role]
        if role.kind is RoleKind.THOUGHT:
            self._think(source, content)
            return
        if role.kind is RoleKind.TEXT and self._joined(source, content):
            return
        if optional and not self._allowed(source.role):
            self.repairs[Repair.DROPPED_MESSAGE] += 1
            return
        if role.no_thought and self._ends_with_thought():
            self._items.pop()
            self.repairs[Repair.DROPPED_THOUGHT] += 1
        if role.needs_thought and not self._ends_with_thought() and missing_thought.strip():
            thought = StepSource(self._spec.thought_roles[0], "", source.event, repair=Repair.MISSING_THOUGHT)
            self._items.append(_DraftStep(thought, missing_thought))
            self.repairs[Repair.MISSING_THOUGHT] += 1
        self._items.append(_DraftStep(source, content))

    def observe(self, source: StepSource, text: str) -> None:
        """Add what the environment appended, word for word."""
        self._items.append(_DraftStep(source, text, environment=True))

    def sources(self) -> list[dict[str, Any]]:
        """One for each step."""
        return [item.source.dumped() for item in self._items]

    def segments(self) -> tuple[Segment, ...]:
        """The trajectory by author."""
        pieces: list[Segment] = []
        steps: list[Step] = []
        for item in self._items:
            if not item.environment:
                steps.append(Step(item.source.role, item.content))
                continue
            if steps:
                pieces.append(Segment(Author.AGENT, render(Trajectory(tuple(steps)))))
                steps = []
            pieces.append(Segment(Author.ENVIRONMENT, item.content))
        if steps:
            pieces.append(Segment(Author.AGENT, render(Trajectory(tuple(steps)))))
        return tuple(pieces)

    def _think(self, source: StepSource, content: str) -> None:
        if not content.strip():
            return
        if self._ends_with_thought() and self._items[-1].source.role == source.role:
            self._append_to(self._items[-1], source, content)
            self.repairs[Repair.JOINED_THOUGHTS] += 1
        else:
            self._items.append(_DraftStep(source, content))

    def _allowed(self, role: str) -> bool:
        """Whether the order allows ``role`` here."""
        for item in reversed(self._items):
            if not item.environment and not self._is_thought(item):
                return role in self._spec.allowed_next(item.source.role, item.content)
        return role in self._spec.transitions[START]

    def _joined(self, source: StepSource, content: str) -> bool:
        """Whether the message went into the function of the same role directly before it."""
        place = len(self._items) - 1
        while place >= 0 and self._is_thought(self._items[place]):
            place -= 1
        before = self._items[place] if place >= 0 else None
        if before is None or before.environment or before.source.role != source.role:
            return False
        if before.content == content:
            before.source.also.append(source.event)
            self.repairs[Repair.REPEATED_MESSAGE] += 1
            return True
        if source.role in self._spec.allowed_next(source.role, before.content):
            return False
        self._move_thoughts(place)
        self._append_to(before, source, content)
        self.repairs[Repair.JOINED_MESSAGES] += 1
        return True

    def _move_thoughts(self, place: int) -> None:
        """Put the thoughts behind the item at ``place`` in front of it."""
        thoughts, self._items[place + 1 :] = self._items[place + 1 :], []
        target = self._items.pop()
        for thought in thoughts:
            self._think(thought.source, thought.content)
        self._items.append(target)

    def _append_to(self, item: _DraftStep, source: StepSource, content: str) -> None:
        if content.strip() and not _stands_in(item.content, content.strip()):
            item.content = f"{item.content.rstrip()}{_GAP}{content.lstrip()}"
        item.source.also.append(source.event)

    def _ends_with_thought(self) -> bool:
        return bool(self._items) and self._is_thought(self._items[-1])

    def _is_thought(self, item: _DraftStep) -> bool:
        return not item.environment and self._spec.roles[item.source.role].kind is RoleKind.THOUGHT


def _stands_in(text: str, paragraphs: str) -> bool:
    """Whether ``text`` has these paragraphs already; words within one of its sentences are something else."""
    return f"{_GAP}{paragraphs}{_GAP}" in f"{_GAP}{text.strip()}{_GAP}"
