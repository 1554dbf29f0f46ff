"""Text to steps, in one linear pass.

Only the top level is structure: inside a role, everything up to that role's own closing tag is content.
An observation is opaque; in what the agent wrote, a tag of the agent's roles is a nesting fault.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice

from afm.agents.spec import AgentSpec
from afm.errors import Fault, TrajectoryError, suggestion
from afm.trajectory.types import Author, Segment, Step, Trajectory

_TAG_LIKE = re.compile(r"<(/?)([A-Za-z_][\w-]*)(?:\s[^<>]*)?/?>")
MAX_FAULTS = 1000
"""As many faults of one text are listed; nobody reads more, and hostile texts have millions."""
_CUT_TAG = re.compile(r"</?[A-Za-z_][\w-]*\Z|</?\Z")


@dataclass(frozen=True, slots=True)
class Scan:
    """What could be read of a text.

    Attributes:
        trajectory: The closed steps. Where the text is faulty, text between steps stays in their ``prefix``
            and text behind the last one in ``tail``, so that rendering still gives the text back.
        issues: Every fault of structure, in the order of the text; empty when it is sound.
    """

    trajectory: Trajectory
    issues: tuple[TrajectoryError, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """The steps of a text, without judgement.

    Attributes:
        steps: Closed steps; ``prefix`` is everything since the step before.
        tail: What follows the last closed step.
        open_role: Role that is never closed, ``None`` when all are.
        open_start: Offset of its opening tag, or the length of the text.
    """

    steps: tuple[Step, ...]
    tail: str
    open_role: str | None
    open_start: int


@lru_cache(maxsize=64)
def opening_pattern(roles: tuple[str, ...]) -> re.Pattern[str]:
    """Matches an opening tag of any of ``roles``; group 1 is the role."""
    return re.compile(f"<({'|'.join(roles)})>")


@lru_cache(maxsize=64)
def tag_pattern(roles: tuple[str, ...]) -> re.Pattern[str]:
    """Matches an opening or closing tag of any of ``roles``."""
    return re.compile(f"</?(?:{'|'.join(roles)})>")


def split(text: str, spec: AgentSpec) -> Split:
    """Cut ``text`` at its top-level roles; never fails."""
    search = opening_pattern(tuple(spec.roles)).search
    steps: list[Step] = []
    position = 0
    while match := search(text, position):
        role = match[1]
        start, inside = match.span()
        close = text.find(f"</{role}>", inside)
        if close < 0:
            return Split(tuple(steps), text[position:], role, start)
        end = close + len(role) + 3
        steps.append(Step(role, text[inside:close], text[position:start], start, end))
        position = end
    return Split(tuple(steps), text[position:], None, len(text))


def parse(text: str, spec: AgentSpec, *, path: str | None = None, line: int | None = None) -> Trajectory:
    """Read a text whose structure must be sound; ``render`` gives it back byte for byte.

    What may follow what is :func:`afm.trajectory.validate`'s to say.

    Raises:
        TrajectoryError: The first fault, with ``path`` and ``line`` if given.
    """
    found = split(text, spec)
    for issue in _issues(text, found, spec):
        raise issue.located(path, line)
    return Trajectory(found.steps, found.tail)


def scan(text: str, spec: AgentSpec, *, found: Split | None = None) -> Scan:
    """Read whatever can be read, and list every fault of structure, up to ``MAX_FAULTS``.

    Args:
        found: The text's :func:`split`, where the caller has it already.
    """
    found = split(text, spec) if found is None else found
    issues = islice(_issues(text, found, spec), MAX_FAULTS)
    return Scan(Trajectory(found.steps, found.tail), tuple(issues))


def author_segments(text: str, spec: AgentSpec) -> tuple[Segment, ...]:
    """Split a text by author, from its tags alone.

    The environment wrote each top-level observation, with the white space before and after it; an
    observation the text breaks off in reaches to the end. When a role of the agent is never closed, complete
    observations behind its opening tag still count as the environment's: better to mask too much than to
    train on what the agent did not write. Neighbours by one author are joined.
    """
    spans = _observation_spans(text, spec)
    return tuple(_by_author(text, spans))


class FaultFinder:
    """Makes faults of one text; the line of each costs a bisection, however many there are."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _line_ends(self) -> list[int]:
        return [match.start() for match in re.finditer("\n", self.text)]

    def fault(self, kind: Fault, subject: str, complaint: str, character: int) -> TrajectoryError:
        """A fault that reads: subject, where, complaint."""
        line = bisect_left(self._line_ends, character) + 1
        message = f"{subject} at character {character} (line {line} of the text) {complaint}"
        return TrajectoryError(message, kind=kind, character=character)


def _issues(text: str, found: Split, spec: AgentSpec) -> Iterator[TrajectoryError]:
    """Faults of structure in the order of the text."""
    finder = FaultFinder(text)
    tags = tag_pattern(tuple(spec.roles))
    unknown: set[str] = set()
    for step in found.steps:
        if step.prefix and not step.prefix.isspace():
            yield from _gap_issues(finder, step.start - len(step.prefix), step.start, unknown, spec)
        if "<" not in step.content or step.role == spec.observation_role:
            continue
        if nested := tags.search(text, step.content_start, step.content_end):
            complaint = f"stands inside <{step.role}>; expected no tag of a role there"
            yield finder.fault(Fault.NESTED, nested[0], complaint, nested.start())
    begin = len(text) - len(found.tail)
    if text[begin : found.open_start].strip():
        yield from _gap_issues(finder, begin, found.open_start, unknown, spec)
    if found.open_role is not None:
        yield finder.fault(Fault.UNCLOSED, f"<{found.open_role}> opened", "is never closed", found.open_start)


def _gap_issues(
    finder: FaultFinder, begin: int, end: int, unknown: set[str], spec: AgentSpec
) -> Iterator[TrajectoryError]:
    """Faults between two steps: unknown and stray tags, or else the text itself."""
    text = finder.text
    tagged = False
    for tag in _TAG_LIKE.finditer(text, begin, end):
        tagged = True
        if tag[1] != "/":
            complaint = f"is no role of agent {spec.name!r}{_hint(tag[2], unknown, spec)}"
            yield finder.fault(Fault.UNKNOWN_ROLE, _shown(tag[0]), complaint, tag.start())
        elif tag[2] not in unknown:
            yield finder.fault(Fault.STRAY_CLOSE, _shown(tag[0]), "closes nothing", tag.start())
    if tagged:
        return
    if end == len(text) and (cut := _CUT_TAG.search(text, begin)):
        yield finder.fault(Fault.UNCLOSED, _shown(cut[0]), "is cut off by the end of the text", cut.start())
        return
    first = end - len(text[begin:end].lstrip())
    shown = repr(text[first : min(end, first + 40)])
    yield finder.fault(Fault.STRAY_TEXT, shown, "stands outside of every role", first)


def _hint(name: str, unknown: set[str], spec: AgentSpec) -> str:
    """The closest role, for a name met for the first time."""
    if name in unknown:
        return ""
    unknown.add(name)
    return f"; {suggestion(name, spec.roles)}"


def _shown(tag: str) -> str:
    return tag if len(tag) <= 60 else f"{tag[:60]}..."


def _observation_spans(text: str, spec: AgentSpec) -> list[tuple[int, int]]:
    role = spec.observation_role
    if role is None:
        return []
    found = split(text, spec)
    spans = [(step.start, step.end) for step in found.steps if step.role == role]
    if found.open_role == role:
        spans.append((found.open_start, len(text)))
    elif found.open_role is not None:
        spans += _complete_pairs(text, found.open_start, role)
    return spans


def _complete_pairs(text: str, begin: int, role: str) -> Iterator[tuple[int, int]]:
    opening, closing = f"<{role}>", f"</{role}>"
    while (start := text.find(opening, begin)) >= 0:
        end = text.find(closing, start)
        if end < 0:
            return
        begin = end + len(closing)
        yield start, begin


def _by_author(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[Segment]:
    agent_from = 0
    pending = ""
    for start, end in spans:
        before = text[agent_from:start].rstrip()
        if before:
            if pending:
                yield Segment(Author.ENVIRONMENT, pending)
                pending = ""
            yield Segment(Author.AGENT, before)
        stop = _after_space(text, end)
        pending += text[agent_from + len(before) : stop]
        agent_from = stop
    if pending:
        yield Segment(Author.ENVIRONMENT, pending)
    if agent_from < len(text):
        yield Segment(Author.AGENT, text[agent_from:])


_SPACE = re.compile(r"\s*")


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position
