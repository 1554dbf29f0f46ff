"""Shapes of a trajectory in memory.

Text between steps is kept, so that ``render(parse(text)) == text`` byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Author(StrEnum):
    """Who wrote a piece of text."""

    AGENT = "agent"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of text by one author, in the order written."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic when a record holds segments
    author: Author
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """One tagged function call of the agent, or one observation.

    Two steps of equal text are equal, whatever their places.

    Attributes:
        role: Tag name.
        content: Everything between the tags, unchanged.
        prefix: White space between the previous step and the opening tag.
        start: Offset of the opening tag's ``<`` in the parsed text (characters), -1 when not parsed.
        end: Offset just behind the closing tag's ``>``, -1 when not parsed.
    """

    role: str
    content: str
    prefix: str = ""
    start: int = field(default=-1, compare=False)
    end: int = field(default=-1, compare=False)

    @property
    def content_start(self) -> int:
        """Offset of the content's first character."""
        return self.start + len(self.role) + 2

    @property
    def content_end(self) -> int:
        """Offset just behind the content's last character."""
        return self.end - len(self.role) - 3


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Steps in order, and the white space behind the last one."""

    steps: tuple[Step, ...]
    tail: str = ""

    def __repr__(self) -> str:
        return f"Trajectory({', '.join(step.role for step in self.steps)})"
