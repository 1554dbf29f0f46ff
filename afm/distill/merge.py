"""Merging a team's event log into one Chain-of-Agents trajectory per task.

The trajectory is the last attempt as a single agent would have written it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec, RoleKind
from afm.agents.spec import START
from afm.configuration import Settings
from afm.datasets import Task
from afm.distill.event_log import (
    DECLINED,
    ESTIMATED,
    INTENT,
    PART,
    THOUGHT,
    TOKENS,
    Event,
    EventKind,
    final_attempts,
)
from afm.errors import ConfigError, suggestion
from afm.trajectory import observation_text, render, validate
from afm.trajectory.answer import dressed_answer
from afm.trajectory.record import CallRecord, Cost, Record, StopReason
from afm.trajectory.tags import Author, Segment, Step, Trajectory


class RoleMap(Settings):
    """The role of the agent that the messages of each team member become.

    Tool calls, tool results and the final answer need no entry. The agent's declaration defines their roles.
    """

    messages: dict[str, str]
    silent: tuple[str, ...] = ()
    """Members whose messages stay out of the trajectory. Their thoughts stay in."""
    optional: tuple[str, ...] = ()
    """Members whose messages are left out wherever the agent's order forbids them."""
    thought: str | None = None
    """The role of members' thoughts before they act. The default is the agent's only thought role."""
    missing_thought: str = ""
    """The text for a thought that the agent needs and no member had. ``{intent}`` is the purpose of the step. If empty, a
    trajectory without the thought is rejected."""
    missing_last_thought: str = ""
    """As ``missing_thought``, before the final answer."""

    def checked(self, spec: AgentSpec) -> RoleMap:
        """Return this map if it suits the agent.

        Raises:
            ConfigError: The map contains a role that ``spec`` lacks.
        """
        named = dict(self.messages) | ({"thought": self.thought} if self.thought is not None else {})
        for member, tag in named.items():
            if tag not in spec.roles:
                raise ConfigError(
                    f"role map: {member!r} -> {tag!r} is not a role of agent {spec.name!r}; "
                    f"{suggestion(tag, spec.roles)}"
                )
        return self

    def role_of(self, event: Event, spec: AgentSpec) -> str | None:
        """Return the role of a message, or ``None`` if the map has no entry."""
        if event.meta.get(PART) != THOUGHT:
            return self.messages.get(event.agent)
        only = spec.thought_roles[0] if len(spec.thought_roles) == 1 else None
        return self.thought or only

    def stand_in(self, event: Event) -> str:
        """Return the thought for a step that lacks one. Empty if its text needs an intent that the event lacks."""
        words = self.missing_last_thought if event.kind is EventKind.FINAL else self.missing_thought
        intent = str(event.meta.get(INTENT, "")).strip()
        return "" if "{intent}" in words and not intent else words.replace("{intent}", intent)


def merge_log(
    path: str | Path, spec: AgentSpec, roles: RoleMap, *, team: str = "", seed: int | None = None
) -> Iterator[Record]:
    """Stream one record per task of an event log, from its last ended attempt, in the order of the run's tasks."""
    for events in final_attempts(path):
        yield merge_attempt(events, spec, roles, team=team, seed=seed)


def merge_attempt(
    events: Sequence[Event], spec: AgentSpec, roles: RoleMap, *, team: str = "", seed: int | None = None
) -> Record:
    """Merge one ended attempt into a trajectory.

    Returns:
        A record. ``kept`` is False, with a reason, if the attempt failed or ``spec`` rejects the result.
    """
    task = Task.model_validate(events[0].meta["task"])
    builder = _Builder(spec, roles)
    for event in events[1:]:
        builder.add(event)
    segments = builder.steps.segments()
    reason = builder.problem or _refusal(segments, spec)
    return Record(
        id=task.id,
        agent=spec.name,
        agent_digest=spec.digest,
        question=task.question,
        ground_truth=task.ground_truth,
        data_source=task.data_source,
        segments=tuple(segments),
        model=team,
        seed=seed,
        stop=StopReason.ANSWER if builder.answered else StopReason.ERROR,
        cost=_cost(events),
        calls=tuple(builder.calls),
        provenance=_provenance(events, builder.steps, task),
        kept=not reason,
        reason=reason,
    )


class _Builder:
    """Builds the steps of one attempt from its events."""

    def __init__(self, spec: AgentSpec, roles: RoleMap) -> None:
        self.calls: list[CallRecord] = []
        self.steps = Steps(spec)
        self.problem = ""
        self.answered = False
        self._spec = spec
        self._roles = roles
        self._tags_of_tools = {tool: tag for tag, tool in spec.tool_roles.items()}
        self._pending: Event | None = None

    def add(self, event: Event) -> None:
        """Add one event. The first event that does not fit becomes the problem."""
        match event.kind:
            case EventKind.MESSAGE:
                if event.agent not in self._roles.silent or event.meta.get(PART) == THOUGHT:
                    self._write(self._roles.role_of(event, self._spec), event)
            case EventKind.TOOL_CALL:
                self._write(self._tags_of_tools.get(event.tool), event)
                self._pending = event
            case EventKind.TOOL_RESULT:
                self._observe(event)
            case EventKind.FINAL:
                self._write(self._spec.answer_role, event, dressed_answer(event.content, self._spec))
                self.answered = True
            case EventKind.ERROR:
                verb = "declined" if event.meta.get(DECLINED) else "failed"
                self._refuse(f"team {verb}: {event.content}")

    def _write(self, tag: str | None, event: Event, content: str | None = None) -> None:
        if tag is None:
            self._refuse(f"no role for {event.kind.value} of {event.agent!r} {event.tool}".rstrip())
            return
        source = StepSource(tag, event.agent, event.id)
        self.steps.write(
            source,
            event.content if content is None else content,
            missing_thought=self._roles.stand_in(event),
            optional=event.kind is EventKind.MESSAGE and event.agent in self._roles.optional,
        )

    def _observe(self, event: Event) -> None:
        call, self._pending = self._pending, None
        tag = self._spec.observation_role
        if call is None or call.tool != event.tool or tag is None:
            self._refuse(f"tool result {event.id} answers no call")
            return
        limit = self._spec.limits.max_observation_chars
        self.steps.observe(
            StepSource(tag, event.agent, event.id), observation_text(event.content, self._spec, limit)
        )
        self.calls.append(
            CallRecord(
                role=self._tags_of_tools.get(call.tool, ""),
                tool=call.tool,
                argument=call.content,
                observation=event.content,
                ok=event.ok,
                seconds=event.seconds,
            )
        )

    def _refuse(self, reason: str) -> None:
        self.problem = self.problem or reason


def _refusal(segments: tuple[Segment, ...], spec: AgentSpec) -> str:
    """Return why the agent's declaration rejects the trajectory. Empty if it accepts it."""
    issues = validate(segments, spec)
    return f"format: {issues[0]}" if issues else ""


def _provenance(events: Sequence[Event], steps: Steps, task: Task) -> dict[str, Any]:
    """Return the attempt and the events behind the steps, the repairs, and the cost in US dollars."""
    provenance: dict[str, Any] = {
        "attempt": events[0].attempt,
        "steps": steps.sources(),
        "extra_info": task.extra_info,
    }
    if steps.repairs:
        provenance["repairs"] = {str(kind): count for kind, count in sorted(steps.repairs.items())}
    if cost_usd := sum(event.cost_usd for event in events):
        provenance["cost_usd"] = round(cost_usd, 6)
    return provenance


def _cost(events: Sequence[Event]) -> Cost:
    results = [event for event in events if event.kind is EventKind.TOOL_RESULT]
    asked = [event for event in events if event.kind is EventKind.CALL]
    read = sum(event.prompt_tokens for event in events)
    return Cost(
        prompt_tokens=read,
        read_tokens=read,
        agent_tokens=sum(event.completion_tokens for event in events),
        generations=sum(event.completion_tokens > 0 for event in events),
        unmetered=sum(event.meta.get(TOKENS) == ESTIMATED for event in asked),
        tool_calls=len(results),
        tool_failures=sum(not event.ok for event in results),
        generation_seconds=round(sum(event.seconds for event in asked), 3),
        tool_seconds=sum(event.seconds for event in results),
        wall_seconds=round(events[-1].time - events[0].time, 3),
    )


_GAP = "\n\n"


class Repair(StrEnum):
    """A kind of repair."""

    JOINED_THOUGHTS = "joined thoughts"
    JOINED_MESSAGES = "joined messages"
    REPEATED_MESSAGE = "repeated message"
    DROPPED_THOUGHT = "dropped thought"
    DROPPED_MESSAGE = "dropped message"
    MISSING_THOUGHT = "missing thought"


@dataclass(slots=True)
class StepSource:
    """The origin of a step: its member, its event, and the events that were joined to it."""

    role: str
    agent: str
    event: str
    also: list[str] = field(default_factory=list)
    repair: str = ""

    def dumped(self) -> dict[str, Any]:
        """Return the form that a record's provenance holds."""
        row: dict[str, Any] = {"role": self.role, "agent": self.agent, "event": self.event}
        if self.also:
            row["also"] = self.also
        if self.repair:
            row["repair"] = self.repair
        return row


@dataclass(slots=True)
class _DraftStep:
    """A step of the agent, or the complete text that the environment appended."""

    source: StepSource
    content: str
    environment: bool = False


class Steps:
    """The steps of one trajectory in the order of their events.

    Attributes:
        repairs: Number of repairs of each kind.
    """

    def __init__(self, spec: AgentSpec) -> None:
        self.repairs: Counter[str] = Counter()
        self._spec = spec
        self._items: list[_DraftStep] = []

    def write(
        self, source: StepSource, content: str, *, missing_thought: str = "", optional: bool = False
    ) -> None:
        """Add a member's text.

        Args:
            missing_thought: Replaces a thought that the role needs and lacks.
            optional: Whether to leave the text out where the agent's order forbids it.
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
        """Add the text that the environment appended, word for word."""
        self._items.append(_DraftStep(source, text, environment=True))

    def sources(self) -> list[dict[str, Any]]:
        """Return the origin of each step."""
        return [item.source.dumped() for item in self._items]

    def segments(self) -> tuple[Segment, ...]:
        """Return the trajectory cut by author."""
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
        """Return whether the agent's order allows ``role`` here."""
        for item in reversed(self._items):
            if not item.environment and not self._is_thought(item):
                return role in self._spec.allowed_next(item.source.role, item.content)
        return role in self._spec.transitions[START]

    def _joined(self, source: StepSource, content: str) -> bool:
        """Join a message to a step of the same role directly before it. Returns whether it was joined."""
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
        """Move the thoughts after the item at ``place`` in front of it."""
        thoughts, self._items[place + 1 :] = self._items[place + 1 :], []
        target = self._items.pop()
        for thought in thoughts:
            self._think(thought.source, thought.content)
        self._items.append(target)

    def _append_to(self, item: _DraftStep, source: StepSource, content: str) -> None:
        contained = f"{_GAP}{content.strip()}{_GAP}" in f"{_GAP}{item.content.strip()}{_GAP}"
        if content.strip() and not contained:
            item.content = f"{item.content.rstrip()}{_GAP}{content.lstrip()}"
        item.source.also.append(source.event)

    def _ends_with_thought(self) -> bool:
        return bool(self._items) and self._is_thought(self._items[-1])

    def _is_thought(self, item: _DraftStep) -> bool:
        return not item.environment and self._spec.roles[item.source.role].kind is RoleKind.THOUGHT
