"""Steps and segments, and the scanner of tags for them and for streams, masks and answers.

Only the top level is structure. Inside a role, everything up to the role's closing tag is content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from io import StringIO

from afm.agents.spec import AgentSpec


class Author(StrEnum):
    """The author of a piece of text."""

    AGENT = "agent"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Segment:
    """A continuous text by one author."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic when a record holds segments
    author: Author
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """One tagged step of the agent, or one observation.

    Two steps with equal text are equal, regardless of their places.

    Attributes:
        role: Tag name.
        content: The unchanged text between the tags.
        prefix: White space between the previous step and the opening tag.
        start: Offset in characters of the opening tag's ``<`` in the parsed text, -1 if it was not parsed.
        end: Offset after the closing tag's ``>``, -1 if it was not parsed.
    """

    role: str
    content: str
    prefix: str = ""
    start: int = field(default=-1, compare=False)
    end: int = field(default=-1, compare=False)

    @property
    def content_start(self) -> int:
        """The offset of the content's first character."""
        return self.start + len(self.role) + 2

    @property
    def content_end(self) -> int:
        """The offset after the content's last character."""
        return self.end - len(self.role) - 3


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The steps in order, and the white space after the last one."""

    steps: tuple[Step, ...]
    tail: str = ""

    def __repr__(self) -> str:
        return f"Trajectory({', '.join(step.role for step in self.steps)})"


ANY_TAG = re.compile(r"<(/?)([A-Za-z_][\w.-]*)((?:[\s=][^<>]*?)?)(/?)>")
"""Any tag. The groups are the slash of a closing tag, the name, the attributes and the slash of an empty tag."""
_ANY_OPENING = re.compile(r"<([^\s<>/]+)>")
_SPACE = re.compile(r"\s*")


@lru_cache(maxsize=64)
def opening_pattern(roles: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the opening tags of ``roles``. Group 1 is the role."""
    return re.compile(f"<({'|'.join(roles)})>")


@lru_cache(maxsize=64)
def tag_pattern(roles: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the opening and closing tags of ``roles``."""
    return re.compile(f"</?(?:{'|'.join(roles)})>")


def blocks(text: str, roles: tuple[str, ...] | None = None, begin: int = 0) -> Iterator[Step]:
    """Yield the top-level blocks of ``text`` after ``begin``, in one linear pass.

    A tag that is never closed yields a step with ``end`` -1 and no content. The scan continues after it.

    Args:
        roles: The tags that count, or ``None`` for tags of any name.
    """
    search = (_ANY_OPENING if roles is None else opening_pattern(roles)).search
    closings: dict[str, str] = {}
    unclosed: set[str] = set()
    position = begin
    while match := search(text, position):
        role = match[1]
        start, inside = match.span()
        closing = closings.get(role) or closings.setdefault(role, f"</{role}>")
        close = text.find(closing, inside) if role not in unclosed else -1
        if close >= 0:
            prefix = text[position:start]
            position = close + len(closing)
            yield Step(role, text[inside:close], prefix, start, position)
        else:
            unclosed.add(role)
            yield Step(role, "", text[position:start], start, -1)
            position = inside


@dataclass(frozen=True, slots=True)
class SplitText:
    """The steps of a text without validation.

    Attributes:
        steps: Closed steps. Their ``prefix`` is everything since the previous step.
        tail: The text after the last closed step.
        open_role: The role that is never closed, or ``None``.
        open_start: Offset of its opening tag, or the length of the text.
    """

    steps: tuple[Step, ...]
    tail: str
    open_role: str | None
    open_start: int


def split(text: str, spec: AgentSpec) -> SplitText:
    """Split ``text`` at its top-level roles, up to the first that is never closed. Never fails."""
    steps: list[Step] = []
    open_role, open_start = None, len(text)
    for step in blocks(text, tuple(spec.roles)):
        if step.end < 0:
            open_role, open_start = step.role, step.start
            break
        steps.append(step)
    return SplitText(tuple(steps), text[steps[-1].end :] if steps else text, open_role, open_start)


def author_segments(text: str, spec: AgentSpec) -> tuple[Segment, ...]:
    """Split a text by author using only its tags.

    The environment wrote each top-level observation with the white space around it. An observation that is not closed
    extends to the end of the text. If a role of the agent is never closed, complete observations after its opening tag
    still count as the environment's, because masking too much is better than training on foreign text. Adjacent texts by
    one author are joined.
    """
    return tuple(segments_around(text, _observation_spans(text, spec)))


def segments_around(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[Segment]:
    """Yield the text by author, if the environment wrote ``spans`` (in order) and the white space around them."""
    agent_from = 0
    pending = ""
    for start, end in spans:
        before = text[agent_from:start].rstrip()
        if before:
            if pending:
                yield Segment(Author.ENVIRONMENT, pending)
                pending = ""
            yield Segment(Author.AGENT, before)
        stop = _SPACE.match(text, end).end()  # type: ignore[union-attr]
        pending += text[agent_from + len(before) : stop]
        agent_from = stop
    if pending:
        yield Segment(Author.ENVIRONMENT, pending)
    if agent_from < len(text):
        yield Segment(Author.AGENT, text[agent_from:])


def _observation_spans(text: str, spec: AgentSpec) -> Iterator[tuple[int, int]]:
    role = spec.observation_role
    if role is None:
        return
    for step in blocks(text, tuple(spec.roles)):
        if step.end >= 0:
            if step.role == role:
                yield step.start, step.end
        elif step.role == role:
            yield step.start, len(text)
            return
        else:
            rest = blocks(text, (role,), step.start)
            yield from ((block.start, block.end) for block in rest if block.end >= 0)
            return


@dataclass(frozen=True, slots=True)
class StepOpened:
    """An opening tag is complete."""

    role: str


@dataclass(frozen=True, slots=True)
class StepClosed:
    """A closing tag is complete. The offsets of ``step`` refer to all text fed so far."""

    step: Step


StreamEvent = StepOpened | StepClosed


class StreamParser:
    """Finds steps in text that arrives in pieces, for a model that is still generating.

    The events depend only on the text, not on the pieces, and the steps are those of :func:`split`. Time and memory are
    linear in the text, because each piece is scanned once, except for the few characters that may begin a tag.
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
        """The role that is open, or ``None`` between steps."""
        return self._role

    @property
    def position(self) -> int:
        """The number of characters fed so far."""
        return self._carry_at + len(self._carry)

    def feed(self, text: str) -> list[StreamEvent]:
        """Feed the agent's next piece of text and return the completed events in order."""
        window = self._carry + text
        events: list[StreamEvent] = []
        at = 0
        while True:
            match = self._open(window, at) if self._role is None else self._close(window, at, self._role)
            if match is None:
                break
            event, at = match
            events.append(event)
        keep = self._undecided_from(window, at)
        self._seen.write(window[at:keep])
        self._carry = window[keep:]
        self._carry_at += keep
        return events

    def feed_observation(self, text: str) -> list[StreamEvent]:
        """Feed the text that the environment appended between two steps.

        Raises:
            ValueError: A role of the agent is open, so the text would become its content.
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
        """Return the offset from which ``window`` may still become a relevant tag."""
        longest = self._longest_tag if self._role is None else len(self._role) + 3
        bracket = window.rfind("<", max(at, len(window) - longest + 1))
        return len(window) if bracket < 0 else bracket

    def _seen_until(self, last: str) -> str:
        self._seen.write(last)
        text = self._seen.getvalue()
        self._seen.seek(0)
        self._seen.truncate()
        return text
