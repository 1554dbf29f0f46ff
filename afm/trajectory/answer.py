"""Extraction of the final answer from the agent's own text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from afm.agents.spec import AgentSpec, AnswerFormat
from afm.trajectory.tags import Author, Segment, split

_BRACES = re.compile(r"\\(boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})(.*)$", re.MULTILINE)


def answers(segments: Sequence[Segment], spec: AgentSpec) -> tuple[str, ...]:
    r"""Return the final answers of a response, ``()`` if none has the agent's format.

    Only the first closed answer role that the agent wrote counts. The answer is the content of its last ``\boxed{}`` or
    last fenced block, if the agent's format requires one. It is split at the agent's separator, without empty parts.
    """
    content = answer_content(segments, spec)
    return () if content is None else read_answer(content, spec)


def read_answer(content: str, spec: AgentSpec) -> tuple[str, ...]:
    """Return the final answers in the content of an answer role, ``()`` if it does not have the agent's format."""
    inner = _unwrapped(content, spec.answer_format)
    if inner is None or spec.answer_separator is None:
        return (inner,) if inner else ()
    return tuple(part.strip() for part in inner.split(spec.answer_separator) if part.strip())


def answer_content(segments: Sequence[Segment], spec: AgentSpec) -> str | None:
    """Return the unchanged content of the answer role, or ``None`` if the agent gave no answer."""
    text = "".join(segment.text for segment in segments)
    for step in split(text, spec).steps:
        if step.role == spec.answer_role and written_by_agent(segments, step.start, step.end):
            return step.content
    return None


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` with balanced braces, or ``None`` without a box.

    The outermost of nested boxes counts. Escaped braces are text.
    """
    box = (0, 0)
    opened: list[int | None] = []
    for token in _BRACES.finditer(text):
        if token[0] == "{":
            opened.append(None)
        elif token[0] == "}":
            begin = opened.pop() if opened else None
            box = box if begin is None else (begin, token.start())
        elif token[1]:
            opened.append(token.end())
    return text[slice(*box)].strip() if box[0] else None


def fenced(text: str) -> str | None:
    """Return the content of the last closed fenced block, or ``None`` without one."""
    content = None
    opening: re.Match[str] | None = None
    for line in _FENCE.finditer(text):
        if opening is None:
            opening = line
        elif line[1].startswith(opening[1]) and not line[2].strip():
            content = text[opening.end() + 1 : line.start()]
            opening = None
    return None if content is None else content.removesuffix("\n")


def _unwrapped(content: str, answer_format: AnswerFormat) -> str | None:
    if answer_format is AnswerFormat.BOXED:
        return boxed(content)
    if answer_format is AnswerFormat.FENCE:
        return fenced(content)
    return content.strip() or None


def written_by_agent(segments: Sequence[Segment], start: int, end: int) -> bool:
    """Return whether the agent wrote every character of a response between ``start`` and ``end``."""
    position = 0
    for segment in segments:
        stop = position + len(segment.text)
        if segment.author is not Author.AGENT and position < end and stop > start:
            return False
        position = stop
    return True


def dressed_answer(answer: str, spec: AgentSpec) -> str:
    """Return a team's answer in the format of the agent's answer role. An answer in that format stays unchanged."""
    if spec.answer_format is AnswerFormat.BOXED and "\\boxed{" not in answer:
        return f"\\boxed{{{answer}}}"
    if spec.answer_format is AnswerFormat.FENCE and "```" not in answer:
        return f"\n```py\n{answer.rstrip()}\n```\n"
    return answer
