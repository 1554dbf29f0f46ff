"""Whether a response keeps the rules of its agent: structure, order, thoughts, counts, authors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from afm.agents.spec import START, AgentSpec, RoleKind
from afm.errors import Fault, TrajectoryError
from afm.trajectory.parse import FaultFinder, scan
from afm.trajectory.types import Author, Segment, Step


def validate(segments: Sequence[Segment], spec: AgentSpec) -> tuple[TrajectoryError, ...]:
    """Every fault of a response, in the order of its text; an empty result means it is valid.

    Checked: the structure (see :func:`afm.trajectory.scan`), what may follow what including grades, required,
    forbidden and doubled thoughts, counts, an observation directly behind every tool call, one answer
    with nothing behind it, and that the environment wrote the observations and the agent all else.
    """
    text = "".join(segment.text for segment in segments)
    found = scan(text, spec)
    steps = found.trajectory.steps
    finder = FaultFinder(text)
    faults = [
        *found.issues,
        *_Order(finder, spec).faults(steps),
        *_author_faults(segments, steps, finder, spec),
    ]
    return tuple(sorted(faults, key=lambda error: error.character))


class _Order:
    """Walks the steps and reports what may not stand where it stands."""

    def __init__(self, finder: FaultFinder, spec: AgentSpec) -> None:
        self._finder = finder
        self._spec = spec
        self._allowed = spec.transitions[START]
        self._before = START
        self._waiting: Step | None = None
        self._thought = False
        self._answered = False
        self._counts: Counter[str] = Counter()

    def faults(self, steps: Sequence[Step]) -> Iterator[TrajectoryError]:
        for step in steps:
            kind = self._spec.roles[step.role].kind
            if self._answered:
                message = (
                    f"<{step.role}> {{at}} stands behind <{self._spec.answer_role}>, which must be the end"
                )
                yield self._fault(Fault.AFTER_ANSWER, message, step.start)
            elif kind is RoleKind.OBSERVATION:
                yield from self._observation(step)
            else:
                yield from self._unanswered_call(step)
                yield from self._thought_step(step) if kind is RoleKind.THOUGHT else self._function(step)
        yield from self._end()

    def _observation(self, step: Step) -> Iterator[TrajectoryError]:
        if self._waiting is None:
            message = f"<{step.role}> {{at}} has no tool call directly before it"
            yield self._fault(Fault.OBSERVATION, message, step.start)
        self._waiting = None

    def _unanswered_call(self, step: Step) -> Iterator[TrajectoryError]:
        if self._waiting is not None:
            message = f"<{step.role}> {{at}} follows <{self._waiting.role}>; expected <{self._spec.observation_role}>"
            yield self._fault(Fault.OBSERVATION, message, step.start)
            self._waiting = None

    def _thought_step(self, step: Step) -> Iterator[TrajectoryError]:
        if self._thought:
            message = f"<{step.role}> {{at}} directly follows another thought"
            yield self._fault(Fault.THOUGHT, message, step.start)
        self._thought = True

    def _function(self, step: Step) -> Iterator[TrajectoryError]:
        role = self._spec.roles[step.role]
        if step.role not in self._allowed:
            after = "the beginning" if self._before == START else f"<{self._before}>"
            expected = " or ".join(f"<{tag}>" for tag in self._allowed) or "nothing"
            message = f"<{step.role}> {{at}} may not follow {after}; expected {expected}"
            yield self._fault(Fault.TRANSITION, message, step.start)
        if role.needs_thought and not self._thought:
            message = f"<{step.role}> {{at}} has no {self._thought_names()} directly before it"
            yield self._fault(Fault.THOUGHT, message, step.start)
        if role.no_thought and self._thought:
            message = (
                f"<{step.role}> {{at}} has {self._thought_names()} directly before it; expected none there"
            )
            yield self._fault(Fault.THOUGHT, message, step.start)
        self._counts[step.role] += 1
        if role.max_count is not None and self._counts[step.role] == role.max_count + 1:
            message = f"<{step.role}> {{at}} exceeds its count; expected at most {role.max_count}"
            yield self._fault(Fault.COUNT, message, step.start)
        self._move(step, role.kind)

    def _move(self, step: Step, kind: RoleKind) -> None:
        self._thought = False
        self._before = step.role
        self._allowed = self._spec.allowed_next(step.role, step.content)
        self._waiting = step if kind is RoleKind.TOOL else None
        self._answered = kind is RoleKind.ANSWER

    def _end(self) -> Iterator[TrajectoryError]:
        if not self._answered:
            message = f"the response ends {{at}} without <{self._spec.answer_role}>"
            yield self._fault(Fault.NO_ANSWER, message, len(self._finder.text))

    def _thought_names(self) -> str:
        return " or ".join(f"<{tag}>" for tag in self._spec.thought_roles)

    def _fault(self, kind: Fault, message: str, character: int) -> TrajectoryError:
        return self._finder.fault(kind, message, character)


def _author_faults(
    segments: Sequence[Segment], steps: Sequence[Step], finder: FaultFinder, spec: AgentSpec
) -> Iterator[TrajectoryError]:
    environment = _environment_spans(segments)
    index = 0
    for step in steps:
        while index < len(environment) and environment[index][1] <= step.start:
            index += 1
        begin, end = environment[index] if index < len(environment) else (sys.maxsize, sys.maxsize)
        if step.role == spec.observation_role:
            if not (begin <= step.start and step.end <= end):
                message = f"<{step.role}> {{at}} was written by the agent; only the environment may"
                yield finder.fault(Fault.AUTHOR, message, step.start)
        elif begin < step.end:
            message = f"<{step.role}> {{at}} was written by the environment; expected the agent"
            yield finder.fault(Fault.AUTHOR, message, step.start)


def _environment_spans(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Runs of text by the environment, neighbours joined."""
    spans: list[tuple[int, int]] = []
    position = 0
    for segment in segments:
        stop = position + len(segment.text)
        if segment.author is Author.ENVIRONMENT and segment.text:
            if spans and spans[-1][1] == position:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((position, stop))
        position = stop
    return spans
