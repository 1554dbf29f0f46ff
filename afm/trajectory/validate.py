"""Whether a response keeps the rules of its agent: structure, order, thoughts, counts, authors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from afm.agents.spec import START, AgentSpec, RoleKind
from afm.errors import Fault, TrajectoryError
from afm.trajectory.answer import read_answer
from afm.trajectory.parse import MAX_FAULTS, FaultFinder, Split, scan
from afm.trajectory.types import Author, Segment, Step


def validate(
    segments: Sequence[Segment], spec: AgentSpec, *, found: Split | None = None
) -> tuple[TrajectoryError, ...]:
    """Every fault of a response, in the order of its text; an empty result means it is valid.

    Checked: the structure (see :func:`afm.trajectory.scan`), what may follow what including grades, required,
    forbidden and doubled thoughts, counts, empty steps, an observation directly behind every tool call, one answer
    in its format with nothing behind it, and that the environment wrote the observations and the agent all else. Of each of
    structure, order and authors, the first ``MAX_FAULTS`` are listed.

    Args:
        found: What :func:`afm.trajectory.parse.split` made of the text, where the caller has it already.
    """
    text = "".join(segment.text for segment in segments)
    scanned = scan(text, spec, found=found)
    steps = scanned.trajectory.steps
    finder = FaultFinder(text)
    faults = [
        *scanned.issues,
        *islice(_Order(finder, spec).faults(steps), MAX_FAULTS),
        *islice(_author_faults(segments, steps, finder, spec), MAX_FAULTS),
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
        roles = self._spec.roles
        for step in steps:
            kind = roles[step.role].kind
            if self._answered:
                complaint = f"stands behind <{self._spec.answer_role}>, which must be the end"
                yield self._fault(Fault.AFTER_ANSWER, step, complaint)
                continue
            if kind is RoleKind.OBSERVATION:
                if self._waiting is None:
                    yield self._fault(Fault.OBSERVATION, step, "has no tool call directly before it")
                self._waiting = None
                continue
            if self._waiting is not None:
                yield self._unanswered_call(step, self._waiting)
            if kind is not RoleKind.ANSWER and not step.content.strip():
                yield self._fault(Fault.EMPTY, step, "holds nothing; expected text")
            if kind is not RoleKind.THOUGHT:
                yield from self._function(step)
                continue
            if self._thought:
                yield self._fault(Fault.THOUGHT, step, "directly follows another thought")
            self._thought = True
        if not self._answered:
            complaint = f"has no closed <{self._spec.answer_role}> before it"
            end = len(self._finder.text)
            yield self._finder.fault(Fault.NO_ANSWER, "the end of the response", complaint, end)

    def _unanswered_call(self, step: Step, call: Step) -> TrajectoryError:
        self._waiting = None
        complaint = f"follows <{call.role}>; expected <{self._spec.observation_role}>"
        return self._fault(Fault.OBSERVATION, step, complaint)

    def _function(self, step: Step) -> Iterator[TrajectoryError]:
        role = self._spec.roles[step.role]
        if step.role not in self._allowed:
            after = "begin the response" if self._before == START else f"follow <{self._before}>"
            expected = " or ".join(f"<{tag}>" for tag in self._allowed) or "nothing"
            yield self._fault(Fault.TRANSITION, step, f"may not {after}; expected {expected}")
        if role.needs_thought and not self._thought:
            yield self._fault(Fault.THOUGHT, step, f"has no {self._thought_names()} directly before it")
        if role.no_thought and self._thought:
            complaint = f"has {self._thought_names()} directly before it; expected none there"
            yield self._fault(Fault.THOUGHT, step, complaint)
        if role.max_count is not None:
            self._counts[step.role] += 1
            if self._counts[step.role] == role.max_count + 1:
                yield self._fault(Fault.COUNT, step, f"exceeds its count; expected at most {role.max_count}")
        if role.kind is RoleKind.ANSWER and not read_answer(step.content, self._spec):
            complaint = f"holds no answer in the format {self._spec.answer_format.value!r}"
            yield self._fault(Fault.ANSWER_FORMAT, step, complaint)
        self._move(step, role.kind)

    def _move(self, step: Step, kind: RoleKind) -> None:
        self._thought = False
        self._before = step.role
        self._allowed = self._spec.allowed_next(step.role, step.content)
        self._waiting = step if kind is RoleKind.TOOL else None
        self._answered = kind is RoleKind.ANSWER

    def _thought_names(self) -> str:
        return " or ".join(f"<{tag}>" for tag in self._spec.thought_roles)

    def _fault(self, kind: Fault, step: Step, complaint: str) -> TrajectoryError:
        return self._finder.fault(kind, f"<{step.role}>", complaint, step.start)


def _author_faults(
    segments: Sequence[Segment], steps: Sequence[Step], finder: FaultFinder, spec: AgentSpec
) -> Iterator[TrajectoryError]:
    environment = iter(_environment_spans(segments))
    nowhere = (sys.maxsize, sys.maxsize)
    begin, end = next(environment, nowhere)
    for step in steps:
        while end <= step.start:
            begin, end = next(environment, nowhere)
        if step.role == spec.observation_role:
            if not (begin <= step.start and step.end <= end):
                complaint = "was written by the agent; only the environment may"
                yield finder.fault(Fault.AUTHOR, f"<{step.role}>", complaint, step.start)
        elif begin < step.end:
            yield finder.fault(Fault.AUTHOR, f"<{step.role}>", "was written by the environment", step.start)


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
