"""The final answer, taken out of what the agent itself wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence

from afm.agents.spec import AgentSpec, AnswerFormat
from afm.trajectory.tags import Author, Segment, split

_BRACES = re.compile(r"\\(boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})(.*)$", re.MULTILINE)


def answers(segments: Sequence[Segment], spec: AgentSpec) -> tuple[str, ...]:
    r"""The final answers of a response, ``()`` without one in the agent's format.

    Only a closed answer role that the agent wrote counts, the first one. Its content is taken out of
    the last ``\boxed{}`` or the last fenced block where the agent's format asks for it, and split at its
    separator; empty parts are dropped.
    """
    content = answer_content(segments, spec)
    return () if content is None else read_answer(content, spec)


def read_answer(content: str, spec: AgentSpec) -> tuple[str, ...]:
    """The final answers in the content of an answer role, ``()`` when they do not have the agent's format."""
    inner = _unwrapped(content, spec.answer_format)
    if inner is None or spec.answer_separator is None:
        return (inner,) if inner else ()
    return tuple(part.strip() for part in inner.split(spec.answer_separator) if part.strip())


def answer_content(segments: Sequence[Segment], spec: AgentSpec) -> str | None:
    """The content of the answer role, unchanged, or ``None`` when the agent gave no answer."""
    text = "".join(segment.text for segment in segments)
    for step in split(text, spec).steps:
        if step.role == spec.answer_role and written_by_agent(segments, step.start, step.end):
            return step.content
    return None


def boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{}`` with balanced braces, or ``None`` without a box.

    Of boxes inside each other the outer one counts. Escaped braces are text.
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
    """Content of the last closed fenced block, or ``None`` without one."""
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
    """Whether no character of a response between ``start`` and ``end`` is the environment's."""
    position = 0
    for segment in segments:
        stop = position + len(segment.text)
        if segment.author is not Author.AGENT and position < end and stop > start:
            return False
        position = stop
    return True


def dressed_answer(answer: str, spec: AgentSpec) -> str:
    """A team's bare answer, dressed as the agent's answer role wants it; dressed ones stay as they are."""
    if spec.answer_format is AnswerFormat.BOXED and "\\boxed{" not in answer:
        return f"\\boxed{{{answer}}}"
    if spec.answer_format is AnswerFormat.FENCE and "```" not in answer:
        return f"\n```py\n{answer.rstrip()}\n```\n"
    return answer
