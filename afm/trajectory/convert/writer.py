"""A conversation as the trajectory of an agent: words become thoughts and the answer, calls and results their roles."""

from __future__ import annotations

import re
from collections.abc import Iterator

from afm.agents import AgentSpec
from afm.errors import DataError
from afm.trajectory.answer import dressed_answer
from afm.trajectory.convert.dialogue import Dialogue, Turn, Use, last_call, second_question, tag_of
from afm.trajectory.hygiene import neutralise
from afm.trajectory.parse import opening_pattern, split
from afm.trajectory.record import TextSegment
from afm.trajectory.render import observation_text, render
from afm.trajectory.types import Author, Segment, Step, Trajectory

_SHOWN = 60
"""Characters of a text in an error."""

_REASONING = re.compile(r"<(?P<close>/?)(?P<tag>think|thinking)>", re.IGNORECASE)
"""Tags that reasoning models put around their reasoning, in front of what they say."""


def segments_of(dialogue: Dialogue, spec: AgentSpec, *, missing_thought: str = "") -> tuple[TextSegment, ...]:
    """The trajectory that a conversation is, as ``spec`` writes it.

    Args:
        missing_thought: Stands where the agent needs a thought and nobody had one.

    Raises:
        DataError: A tool is called that the agent lacks, what it returned is not known, or the user asks again.
    """
    writer = _Writer(spec, missing_thought)
    last = len(dialogue.turns) - 1
    for number, turn in enumerate(dialogue.turns):
        for use in turn.uses:
            if not use.tool and last_call(turn.text, spec)[1] is None:
                raise second_question(use.result or "")
        whole = turn.result is not None
        writer.say(turn, last=number == last and not turn.uses and not whole)
        for use in turn.uses:
            writer.use(use, whole=whole)
        if turn.result is not None:
            writer.observe(turn.result)
    return tuple(TextSegment(author=segment.author, text=segment.text) for segment in writer.segments())


def parted(text: str, spec: AgentSpec) -> tuple[str, str]:
    """The reasoning that a model put in tags before its words, and those words.

    Its opening tag may be missing, as where the chat template writes it. In text that keeps to the agent's own roles
    nothing is taken off.
    """
    first = _REASONING.search(text)
    if first is None or (not first["close"] and text[: first.start()].strip()):
        return "", text
    begin = 0 if first["close"] else first.end()
    closing = next((tag for tag in _REASONING.finditer(text, begin) if tag["close"]), None)
    if closing is None:
        return "", text
    rest = text[closing.end() :]
    is_role = first["tag"] in spec.roles
    own = is_role and (not rest.strip() or opening_pattern(tuple(spec.roles)).search(rest))
    return ("", text) if own else (text[begin : closing.start()], rest)


class _Writer:
    """Puts turns together by author."""

    def __init__(self, spec: AgentSpec, missing_thought: str) -> None:
        self._spec, self._missing = spec, missing_thought
        self._segments: list[Segment] = []
        self._tagged = opening_pattern(tuple(spec.roles))
        self._thoughts: list[str] = []
        self._thought = False

    def say(self, turn: Turn, *, last: bool) -> None:
        reasoning, text = parted(turn.text, self._spec)
        self._think(turn.thought)
        self._think(reasoning)
        if self._tagged.search(text):
            self._tags(text)
        elif (last or turn.final) and text.strip():
            self._write(self._spec.answer_role, dressed_answer(text.strip(), self._spec))
        else:
            self._think(text)

    def use(self, use: Use, *, whole: bool) -> None:
        """A call and its result; without one where a result of the whole turn follows."""
        if use.tool:
            self._write(tag_of(use.tool, self._spec), use.text())
        if use.result is not None:
            self.observe(use.result)
        elif not whole:
            raise DataError(f"the call of {use.tool or 'the tool'!r} has no result")

    def observe(self, result: str) -> None:
        limit = self._spec.limits.max_observation_chars
        self._flush()
        self._thought = False
        self._segments.append(Segment(Author.ENVIRONMENT, observation_text(result, self._spec, limit)))

    def segments(self) -> Iterator[Segment]:
        self._flush()
        yield from self._segments

    def _think(self, words: str) -> None:
        """Put words into the next thought; no thought follows another, so all until the next role are one."""
        if not words.strip():
            return
        if not self._spec.thought_roles:
            raise DataError(
                f"agent {self._spec.name!r} has no thoughts, got words outside of its roles: {words[:_SHOWN]!r}"
            )
        self._thoughts.append(neutralise(words.strip(), self._spec))
        self._thought = True

    def _tags(self, text: str) -> None:
        """Add text of the agent; a thought that begins it takes in those before."""
        begun = self._tagged.match(text, len(text) - len(text.lstrip()))
        if self._thoughts and begun and begun[1] in self._spec.thought_roles:
            text = "\n\n".join(
                (text[: begun.end()] + self._thoughts[0], *self._thoughts[1:], text[begun.end() :])
            )
            self._thoughts = []
        self._flush()
        self._add(text)
        closed = split(text, self._spec).steps
        self._thought = bool(closed) and closed[-1].role in self._spec.thought_roles

    def _write(self, tag: str, content: str) -> None:
        if self._spec.roles[tag].needs_thought and not self._thought and self._missing:
            self._thoughts.append(self._missing)
        self._flush()
        self._add(render(Trajectory((Step(tag, content),))))
        self._thought = False

    def _flush(self) -> None:
        if self._thoughts:
            thought = Step(self._spec.thought_roles[0], "\n\n".join(self._thoughts))
            self._add(render(Trajectory((thought,))))
        self._thoughts = []

    def _add(self, text: str) -> None:
        if self._segments and self._segments[-1].author is Author.AGENT:
            text = self._segments.pop().text + text
        self._segments.append(Segment(Author.AGENT, text))
