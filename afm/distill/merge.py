"""From a team's event log to one Chain-of-Agents trajectory per task, as its agent would have written the last attempt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec
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
    ended_attempts,
    read_at,
)
from afm.distill.repair import Steps, StepSource
from afm.errors import ConfigError, suggestion
from afm.trajectory import observation_text, validate
from afm.trajectory.answer import dressed_answer
from afm.trajectory.record import CallRecord, Cost, Record, StopReason
from afm.trajectory.tags import Segment


def final_attempts(path: str | Path) -> Iterator[tuple[Event, ...]]:
    """Stream the last ended attempt at each task, in the order of the run's tasks, whatever failed or was killed before.

    Only the places of the events are held in memory.

    Raises:
        DataError: A complete line of the log is no event.
    """
    ended = {
        first.task_id: (int(first.meta["position"]), places) for first, _, places in ended_attempts(path)
    }
    with Path(path).open("rb") as file:
        for _, places in sorted(ended.values(), key=itemgetter(0)):
            yield tuple(read_at(file, places))


class RoleMap(Settings):
    """Which role of the agent the messages of each team member become.

    Tool calls, tool results and the final answer need no entry: the agent's declaration knows their roles.
    """

    messages: dict[str, str]
    silent: tuple[str, ...] = ()
    """Members whose messages stay out of the trajectory; what they thought stays in."""
    optional: tuple[str, ...] = ()
    """Members whose messages are left out where the agent's order forbids them."""
    thought: str | None = None
    """The role of what members thought before they acted; by default the agent's only one for that."""
    missing_thought: str = ""
    """The text where the agent needs a thought and no member had one; ``{intent}`` is what the step was meant for.
    Empty: such a trajectory is refused."""
    missing_last_thought: str = ""
    """The same before the final answer, where nothing is left to do."""

    def checked(self, spec: AgentSpec) -> RoleMap:
        """The same map.

        Raises:
            ConfigError: It names a role that ``spec`` lacks.
        """
        named = dict(self.messages) | ({"thought": self.thought} if self.thought is not None else {})
        for member, tag in named.items():
            if tag not in spec.roles:
                raise ConfigError(
                    f"role map: {member!r} -> {tag!r} is no role of agent {spec.name!r}; "
                    f"{suggestion(tag, spec.roles)}"
                )
        return self

    def role_of(self, event: Event, spec: AgentSpec) -> str | None:
        """The role that a message plays; ``None`` when the map does not say."""
        if event.meta.get(PART) != THOUGHT:
            return self.messages.get(event.agent)
        only = spec.thought_roles[0] if len(spec.thought_roles) == 1 else None
        return self.thought or only

    def stand_in(self, event: Event) -> str:
        """The thought for a step that lacks one; empty when there is nothing to make it of."""
        words = self.missing_last_thought if event.kind is EventKind.FINAL else self.missing_thought
        intent = str(event.meta.get(INTENT, "")).strip()
        return "" if "{intent}" in words and not intent else words.replace("{intent}", intent)


def merge_log(
    path: str | Path, spec: AgentSpec, roles: RoleMap, *, team: str = "", seed: int | None = None
) -> Iterator[Record]:
    """Stream one record for each task of an event log, of its last ended attempt, in the order of the run's tasks."""
    for events in final_attempts(path):
        yield merge_attempt(events, spec, roles, team=team, seed=seed)


def merge_attempt(
    events: Sequence[Event], spec: AgentSpec, roles: RoleMap, *, team: str = "", seed: int | None = None
) -> Record:
    """Merge one ended attempt into a trajectory.

    Returns:
        A record; ``kept`` is False, with a reason, when the attempt failed or ``spec`` refuses the result.
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
    """Collects steps while the events of one attempt go by."""

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
        """Take over one event; the first that does not fit is noted as the problem."""
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
    """Why the agent's declaration refuses the trajectory, empty when it accepts it."""
    issues = validate(segments, spec)
    return f"format: {issues[0]}" if issues else ""


def _provenance(events: Sequence[Event], steps: Steps, task: Task) -> dict[str, Any]:
    """Which attempt and which events the steps come from, what was repaired, and what it cost in money."""
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
