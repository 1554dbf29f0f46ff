"""An episode as the blocks a page shows: who wrote what, in which role."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from afm.agents import AgentSpec
from afm.trajectory.record import Record
from afm.trajectory.tags import split
from afm.trajectory.types import Author

COLOURS = 12
"""Colours a page has for roles; an agent with more begins again with the first."""

_MAX_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class Block:
    """A run of text on the page.

    Attributes:
        role: The role it stands in, empty for text outside of every role.
        author: Who wrote it.
        text: Without the surrounding white space, the middle of very long text left out.
        colour: Number of the role's colour, ``None`` for the environment and for text without a role.
        code: Whether it reads best in a fixed-width font: a tool's argument, or the environment's text.
        fault: What is wrong with it in a few words, empty when nothing is.
    """

    role: str
    author: Author
    text: str
    colour: int | None = None
    code: bool = False
    fault: str = ""


def role_colours(spec: AgentSpec) -> dict[str, int]:
    """Colour number of each role the agent itself may write, in the order of the declaration."""
    own = [role for role in spec.roles if role != spec.observation_role]
    return {role: number % COLOURS for number, role in enumerate(own)}


def blocks_of(record: Record, spec: AgentSpec | None) -> list[Block]:
    """The response in reading order; without a spec one block a segment."""
    if spec is None:
        return [Block("", part.author, _shown(part.text)) for part in record.segments if part.text.strip()]
    return list(_by_role(record, spec))


def _by_role(record: Record, spec: AgentSpec) -> Iterator[Block]:
    authors = _Authors(record)
    found = split(record.text, spec)
    for step in found.steps:
        yield from _loose(step.prefix, authors.at(step.start - len(step.prefix)))
        author = authors.at(step.content_start)
        yield _block(step.role, author, step.content, spec)
    begin = len(record.text) - len(found.tail)
    yield from _loose(record.text[begin : found.open_start], authors.at(begin))
    if found.open_role is not None:
        content = record.text[found.open_start + len(found.open_role) + 2 :]
        author = authors.at(found.open_start)
        yield _block(found.open_role, author, content, spec, "never closed")


def _block(role: str, author: Author, content: str, spec: AgentSpec, fault: str = "") -> Block:
    agents = author is Author.AGENT
    if agents and role == spec.observation_role:
        fault = "written by the agent itself"
    colour = role_colours(spec).get(role) if agents else None
    code = not agents or role in spec.tool_roles
    return Block(role, author, _shown(content), colour, code, fault)


def _loose(text: str, author: Author) -> Iterator[Block]:
    if text.strip():
        yield Block("", author, _shown(text), fault="outside of every role")


def _shown(text: str) -> str:
    text = text.strip()
    if len(text) <= _MAX_CHARS:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]}\n\n[... {len(text) - 2 * half:,} characters left out ...]\n\n{text[-half:]}"


class _Authors:
    """Who wrote the character at an offset."""

    def __init__(self, record: Record) -> None:
        parts = [part for part in record.segments if part.text]
        self._authors = [part.author for part in parts]
        self._starts = list(accumulate((len(part.text) for part in parts), initial=0))[:-1]

    def at(self, offset: int) -> Author:
        if not self._authors:
            return Author.AGENT
        return self._authors[max(0, bisect_right(self._starts, offset) - 1)]
