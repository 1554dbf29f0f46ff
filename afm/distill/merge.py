"""From a team's event log to one Chain-of-Agents trajectory a task, as its agent would have written it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from afm.agents import AgentSpec, AnswerFormat
from afm.datasets import Task
from afm.distill.record import Event, EventKind, last_attempts, read_attempts
from afm.errors import ConfigError, suggestion
from afm.trajectory import observation_text, render, validate
from afm.trajectory.record import CallRecord, Cost, Record, StopReason, TextSegment
from afm.trajectory.types import Author, Segment, Step, Trajectory


class RoleMap(BaseModel):
    """Which role of the agent the messages of each team member become.

    Tool calls, tool results and the final answer need no entry: the agent's declaration knows their roles.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    messages: dict[str, str]

    def checked(self, spec: AgentSpec) -> RoleMap:
        """The same map.

        Raises:
            ConfigError: It names a role that ``spec`` lacks.
        """
        for member, tag in self.messages.items():
            if tag not in spec.roles:
                raise ConfigError(
                    f"role map: {member!r} -> {tag!r} is no role of agent {spec.name!r}; "
                    f"{suggestion(tag, spec.roles)}"
                )
        return self


def merge_log(
    path: str | Path, spec: AgentSpec, roles: RoleMap, *, team: str = "", seed: int | None = None
) -> Iterator[Record]:
    """Stream one record for each task of an event log, of its last ended attempt, in the order of the run's tasks."""
    last = last_attempts(path)
    for events in read_attempts(path):
        if events[0].attempt == last[events[0].task_id]:
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
    segments = builder.segments()
    reason = builder.problem or _refusal(segments, spec)
    return Record(
        id=task.id,
        agent=spec.name,
        agent_digest=spec.digest,
        question=task.question,
        ground_truth=task.ground_truth,
        data_source=task.data_source,
        segments=tuple(TextSegment(author=segment.author, text=segment.text) for segment in segments),
        model=team,
        seed=seed,
        stop=StopReason.ANSWER if builder.answered else StopReason.ERROR,
        cost=_cost(events),
        calls=tuple(builder.calls),
        provenance={"attempt": events[0].attempt, "steps": builder.sources, "extra_info": task.extra_info},
        kept=not reason,
        reason=reason,
    )


class _Builder:
    """Collects steps and segments while the events of one attempt go by."""

    def __init__(self, spec: AgentSpec, roles: RoleMap) -> None:
        self.calls: list[CallRecord] = []
        self.sources: list[dict[str, str]] = []
        self.problem = ""
        self.answered = False
        self._spec = spec
        self._roles = roles
        self._tags_of_tools = {tool: tag for tag, tool in spec.tool_roles.items()}
        self._steps: list[Step] = []
        self._segments: list[Segment] = []
        self._pending: Event | None = None

    def add(self, event: Event) -> None:
        """Take over one event; the first that does not fit is noted as the problem."""
        match event.kind:
            case EventKind.MESSAGE:
                self._write(self._roles.messages.get(event.agent), event)
            case EventKind.TOOL_CALL:
                self._write(self._tags_of_tools.get(event.tool), event)
                self._pending = event
            case EventKind.TOOL_RESULT:
                self._observe(event)
            case EventKind.FINAL:
                self._write(self._spec.answer_role, event, answer_content(event.content, self._spec))
                self.answered = True
            case EventKind.ERROR:
                self._refuse(f"team failed: {event.content}")

    def segments(self) -> tuple[Segment, ...]:
        """The trajectory by author."""
        self._flush()
        return tuple(self._segments)

    def _write(self, tag: str | None, event: Event, content: str | None = None) -> None:
        if tag is None:
            self._refuse(f"no role for {event.kind.value} of {event.agent!r} {event.tool}".rstrip())
            return
        self._steps.append(Step(tag, event.content if content is None else content))
        self.sources.append({"role": tag, "agent": event.agent, "event": event.id})

    def _observe(self, event: Event) -> None:
        call, self._pending = self._pending, None
        tag = self._spec.observation_role
        if call is None or call.tool != event.tool or tag is None:
            self._refuse(f"tool result {event.id} answers no call")
            return
        self._flush()
        limit = self._spec.limits.max_observation_chars
        self._segments.append(Segment(Author.ENVIRONMENT, observation_text(event.content, self._spec, limit)))
        self.sources.append({"role": tag, "agent": event.agent, "event": event.id})
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

    def _flush(self) -> None:
        if self._steps:
            self._segments.append(Segment(Author.AGENT, render(Trajectory(tuple(self._steps)))))
            self._steps = []

    def _refuse(self, reason: str) -> None:
        self.problem = self.problem or reason


def answer_content(answer: str, spec: AgentSpec) -> str:
    """A team's bare answer, dressed as the agent's answer role wants it; dressed ones stay as they are."""
    if spec.answer_format is AnswerFormat.BOXED and "\\boxed{" not in answer:
        return f"\\boxed{{{answer}}}"
    if spec.answer_format is AnswerFormat.FENCE and "```" not in answer:
        return f"\n```py\n{answer.rstrip()}\n```\n"
    return answer


def _refusal(segments: tuple[Segment, ...], spec: AgentSpec) -> str:
    """Why the agent's declaration refuses the trajectory, empty when it accepts it."""
    issues = validate(segments, spec)
    return f"format: {issues[0]}" if issues else ""


def _cost(events: Sequence[Event]) -> Cost:
    calls = [event for event in events if event.kind is EventKind.TOOL_RESULT]
    said: dict[str, Any] = {
        "prompt_tokens": sum(event.prompt_tokens for event in events),
        "agent_tokens": sum(event.completion_tokens for event in events),
        "generations": sum(event.completion_tokens > 0 for event in events),
    }
    return Cost(
        **said,
        tool_calls=len(calls),
        tool_failures=sum(not event.ok for event in calls),
        tool_seconds=sum(event.seconds for event in calls),
        wall_seconds=round(events[-1].time - events[0].time, 3),
    )
