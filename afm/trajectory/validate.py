"""Strict and lenient parsing of a response, and validation against the rules of its agent.

In the structure, an observation is opaque, and a role's tag inside the agent's own text is a nesting fault. The rules
are order, thoughts, counts and authors.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice

from afm.agents.spec import START, AgentSpec, RoleKind
from afm.errors import DataError, Fault, TrajectoryError, suggestion
from afm.trajectory.answer import read_answer
from afm.trajectory.tags import ANY_TAG, Author, Segment, SplitText, Step, Trajectory, split, tag_pattern

MAX_FAULTS = 1000
"""The most faults that are listed for one text, because hostile texts can have millions."""
_CUT_TAG = re.compile(r"</?[A-Za-z_][\w-]*\Z|</?\Z")


def parse(text: str, spec: AgentSpec, *, path: str | None = None, line: int | None = None) -> Trajectory:
    """Parse a text whose structure must be valid. ``render`` returns the same text.

    :func:`validate` checks the order of roles.

    Raises:
        TrajectoryError: The first fault, with ``path`` and ``line`` if they are set.
        DataError: ``text`` is not a text, or ``spec`` is not an agent.
    """
    if not isinstance(text, str):
        raise DataError(f"got {type(text).__name__}, expected the text of a response", path=path, line=line)
    if not isinstance(spec, AgentSpec):
        raise DataError(f"got {spec!r:.80}, expected an agent, for example load_agent('math')")
    parts = split(text, spec)
    for fault in _structure_faults(text, parts, spec):
        raise fault.located(path, line)
    return Trajectory(parts.steps, parts.tail)


def structure_faults(
    text: str, spec: AgentSpec, *, parts: SplitText | None = None
) -> tuple[TrajectoryError, ...]:
    """Return the faults of structure in the order of the text, at most ``MAX_FAULTS``, empty if it is valid.

    Args:
        parts: The text's :func:`split`, if the caller has it.
    """
    parts = split(text, spec) if parts is None else parts
    return tuple(islice(_structure_faults(text, parts, spec), MAX_FAULTS))


def validate(
    segments: Sequence[Segment], spec: AgentSpec, *, parts: SplitText | None = None
) -> tuple[TrajectoryError, ...]:
    """Return every fault of a response in the order of its text, empty if it is valid.

    It checks:

    - the structure (see :func:`structure_faults`) and the order of roles, including grades;
    - required, forbidden and repeated thoughts, counts, empty steps;
    - an observation directly after every tool call, and one answer in its format at the end;
    - that the environment wrote the observations and the agent everything else.

    At most ``MAX_FAULTS`` are listed for each of structure, order and authors.

    Args:
        parts: The text's :func:`split`, if the caller has it.
    """
    text = "".join(segment.text for segment in segments)
    parts = split(text, spec) if parts is None else parts
    finder = FaultFinder(text)
    faults = [
        *structure_faults(text, spec, parts=parts),
        *islice(_Order(finder, spec).faults(parts.steps), MAX_FAULTS),
        *islice(_author_faults(segments, parts.steps, finder, spec), MAX_FAULTS),
    ]
    return tuple(sorted(faults, key=lambda error: error.character))


class FaultFinder:
    """Creates the faults of one text. It finds the line of each by bisection."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _line_ends(self) -> list[int]:
        return [match.start() for match in re.finditer("\n", self.text)]

    def fault(self, kind: Fault, subject: str, complaint: str, character: int) -> TrajectoryError:
        """Return a fault whose message is the subject, its place and the complaint."""
        line = bisect_left(self._line_ends, character) + 1
        message = f"{subject} at character {character} (line {line} of the text) {complaint}"
        return TrajectoryError(message, kind=kind, character=character)


def _structure_faults(text: str, parts: SplitText, spec: AgentSpec) -> Iterator[TrajectoryError]:
    """Yield the faults of structure in the order of the text."""
    finder = FaultFinder(text)
    tags = tag_pattern(tuple(spec.roles))
    unknown: set[str] = set()
    observation = spec.observation_role
    for step in parts.steps:
        if step.prefix and not step.prefix.isspace():
            yield from _gap_faults(finder, step.start - len(step.prefix), step.start, unknown, spec)
        if step.role == observation or "<" not in step.content:
            continue
        if nested := tags.search(text, step.content_start, step.content_end):
            complaint = f"is inside <{step.role}>; expected no tag of a role there"
            yield finder.fault(Fault.NESTED, nested[0], complaint, nested.start())
    begin = len(text) - len(parts.tail)
    if text[begin : parts.open_start].strip():
        yield from _gap_faults(finder, begin, parts.open_start, unknown, spec)
    if parts.open_role is not None:
        yield finder.fault(Fault.UNCLOSED, f"<{parts.open_role}> opened", "is never closed", parts.open_start)


def _gap_faults(
    finder: FaultFinder, begin: int, end: int, unknown: set[str], spec: AgentSpec
) -> Iterator[TrajectoryError]:
    """Yield the faults between two steps: unknown and stray tags, or else the text itself."""
    text = finder.text
    tagged = False
    for tag in ANY_TAG.finditer(text, begin, end):
        tagged = True
        if tag[1] != "/":
            complaint = f"is not a role of agent {spec.name!r}{_hint(tag[2], unknown, spec)}"
            yield finder.fault(Fault.UNKNOWN_ROLE, _shortened(tag[0]), complaint, tag.start())
        elif tag[2] not in unknown:
            yield finder.fault(Fault.STRAY_CLOSE, _shortened(tag[0]), "closes nothing", tag.start())
    if tagged:
        return
    if end == len(text) and (cut := _CUT_TAG.search(text, begin)):
        yield finder.fault(
            Fault.UNCLOSED, _shortened(cut[0]), "is cut off by the end of the text", cut.start()
        )
        return
    first = end - len(text[begin:end].lstrip())
    shown = repr(text[first : min(end, first + 40)])
    yield finder.fault(Fault.STRAY_TEXT, shown, "is outside of every role", first)


def _hint(name: str, unknown: set[str], spec: AgentSpec) -> str:
    """Return a suggestion for an unknown name at its first occurrence."""
    if name in unknown:
        return ""
    unknown.add(name)
    return f"; {suggestion(name, spec.roles)}"


def _shortened(tag: str) -> str:
    return tag if len(tag) <= 60 else f"{tag[:60]}..."


class _Order:
    """Checks the steps in order and reports those that are not allowed at their places."""

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
                complaint = f"follows <{self._spec.answer_role}>, which must be the end"
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
                yield self._fault(Fault.EMPTY, step, "is empty; expected text")
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
    """Return the spans of text by the environment, with adjacent ones joined."""
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
