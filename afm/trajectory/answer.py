"""The final answer, taken out of what the agent itself wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence

from afm.agents.spec import AgentSpec, AnswerFormat
from afm.trajectory.parse import split
from afm.trajectory.types import Author, Segment

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)^[ \t]*\1[`~]*[ \t]*$", re.DOTALL | re.MULTILINE)


def answers(segments: Sequence[Segment], spec: AgentSpec) -> tuple[str, ...]:
    r"""The final answers of a response, ``()`` when it has none in the agent's format.

    Only a closed answer role that the agent wrote counts, the first one. Its content is taken out of
    the last ``\boxed{}`` or the last fenced block where the agent's format asks for it, and split at its
    separator; empty parts are dropped.
    """
    content = answer_content(segments, spec)
    if content is None:
        return ()
    inner = _unwrapped(content, spec.answer_format)
    if inner is None:
        return ()
    if spec.answer_separator is None:
        return (inner,)
    return tuple(part.strip() for part in inner.split(spec.answer_separator) if part.strip())


def answer_content(segments: Sequence[Segment], spec: AgentSpec) -> str | None:
    """What stands in the answer role, unchanged; ``None`` when the agent gave no answer."""
    text = "".join(segment.text for segment in segments)
    for step in split(text, spec).steps:
        if step.role == spec.answer_role and _is_agents(segments, step.start, step.end):
            return step.content
    return None


def boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{}`` with balanced braces, ``None`` when there is none.

    Boxes inside boxes count as content of the outer one.
    """
    found = None
    position = 0
    while match := _BOX.search(text, position):
        end = _closing_brace(text, match.end())
        if end is None:
            return found
        found = text[match.end() : end].strip()
        position = end + 1
    return found


def fenced(text: str) -> str | None:
    """Content of the last fenced block, ``None`` when there is none."""
    blocks = _FENCE.findall(text)
    return str(blocks[-1][1]).strip("\n") if blocks else None


def _unwrapped(content: str, answer_format: AnswerFormat) -> str | None:
    if answer_format is AnswerFormat.BOXED:
        return boxed(content)
    if answer_format is AnswerFormat.FENCE:
        return fenced(content)
    return content.strip() or None


def _is_agents(segments: Sequence[Segment], start: int, end: int) -> bool:
    position = 0
    for segment in segments:
        stop = position + len(segment.text)
        if segment.author is not Author.AGENT and position < end and stop > start:
            return False
        position = stop
    return True


def _closing_brace(text: str, position: int) -> int | None:
    """Offset of the brace that closes the one before ``position``; escaped braces do not count."""
    depth = 1
    for match in _BRACE.finditer(text, position):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
        if depth == 0:
            return match.start()
    return None
