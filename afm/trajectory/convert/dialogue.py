"""The common model of all conversation formats: a question, turns of the agent, and tool calls with their results.

A trajectory becomes a dialogue by splitting it at its tool calls. The agent's text before a call, with its tags, is the
text of the turn, so that nothing is lost. In the other direction, text with tags of the agent stays unchanged. Other
text becomes a thought, and in the last turn the answer. Hidden reasoning always becomes a thought.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

from afm.agents import AgentSpec
from afm.errors import DataError, suggestion
from afm.trajectory.answer import dressed_answer
from afm.trajectory.observation import neutralise, observation_text, render
from afm.trajectory.programs import CODE_TOOL, program_argument
from afm.trajectory.record import CallRecord, Record
from afm.trajectory.tags import Author, Segment, Step, Trajectory, opening_pattern, split

ItemT = TypeVar("ItemT")

ARGUMENT = "input"
"""The parameter for the text of a call in formats with named parameters."""

_SHOWN = 60
"""The number of characters of a text that errors show."""


@dataclass(frozen=True, slots=True)
class Use:
    """One tool call.

    Attributes:
        tool: Name of the tool, empty if the call is in the text of its turn.
        arguments: The text of the call, or its parameters by name.
        result: The result, or ``None`` if it is unknown.
        ok: Whether the tool succeeded, as far as the row shows.
    """

    tool: str
    arguments: Any
    result: str | None = None
    ok: bool = True

    def text(self) -> str:
        """Return the text of the call: the value of the only parameter, or all parameters as JSON."""
        if isinstance(self.arguments, str):
            return self.arguments
        if isinstance(self.arguments, Mapping) and len(self.arguments) == 1:
            [value] = self.arguments.values()
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """The agent's text, followed by its tool calls.

    Attributes:
        final: Whether the text is only the answer.
        thought: A thought before the text, such as hidden reasoning. It is never the answer, and tags in it are text.
        result: A result of the whole turn instead of one of its calls, whose results may then be unknown.
    """

    text: str = ""
    uses: tuple[Use, ...] = ()
    final: bool = False
    thought: str = ""
    result: str | None = None


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One conversation about one question.

    Attributes:
        question: The question as asked, including any instruction before it.
        facts: Further fields of the record by name.
        lost: Short descriptions of what the row held and a record cannot hold.
    """

    question: str
    turns: tuple[AgentTurn, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    lost: tuple[str, ...] = ()


def dialogue_of(record: Record, spec: AgentSpec) -> Dialogue:
    """Return the conversation of a record. Its question includes the agent's instruction."""
    turns: list[AgentTurn] = []
    pending = ""
    for segment in _joined(record):
        if segment.author is Author.AGENT:
            pending += segment.text
            continue
        before, tool, argument = last_call(pending, spec)
        if tool is None:
            pending += segment.text
            continue
        turns.append(AgentTurn(before, (Use(tool, argument, _inner(segment.text, spec)),)))
        pending = ""
    if pending or not turns:
        turns.append(AgentTurn(pending))
    return Dialogue(spec.user_message(record.question), tuple(turns))


class Walk:
    """A conversation while it is read. Each format defines what its items add."""

    def __init__(self) -> None:
        self.question: str | None = None
        self.turns: list[AgentTurn] = []
        self.lost: list[str] = []

    def ask(self, text: str) -> None:
        """Add to the question. After the agent's first turn it would be another question, which is an error."""
        if self.turns:
            raise second_question(text)
        self.question = text if self.question is None else f"{self.question}\n\n{text}"

    def give(self, turn: int, use: int, result: str, *, ok: bool = True) -> None:
        """Set the result of a call."""
        uses = list(self.turns[turn].uses)
        uses[use] = replace(uses[use], result=result, ok=ok)
        self.turns[turn] = replace(self.turns[turn], uses=tuple(uses))

    def dialogue(self, without_question: str, facts: Mapping[str, Any] | None = None) -> Dialogue:
        """Return the whole dialogue. Without a question, raise an error with the text ``without_question``."""
        if self.question is None:
            raise DataError(without_question)
        return Dialogue(self.question, tuple(self.turns), facts or {}, tuple(dict.fromkeys(self.lost)))


def take_all(items: Iterable[ItemT], take: Callable[[ItemT], None], place: str) -> None:
    """Pass each item to ``take``. Its errors get the location ``place`` with the item's number."""
    for number, item in enumerate(items):
        try:
            take(item)
        except DataError as error:
            raise DataError(f"{place.format(number)}: {error.message}") from None


def second_question(text: str) -> DataError:
    """Return the error for a conversation in which the user asks again."""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return DataError(
        f"got a second message of the user, {shown!r}, that answers no tool call; expected one question per row, as in a trajectory. "
        "Make one row per question, and put the earlier messages into its text. Put the result of a tool directly after its call"
    )


def calls_of(dialogue: Dialogue, spec: AgentSpec) -> tuple[CallRecord, ...]:
    """Return the tool calls of a record, with unchanged results."""
    calls = []
    for turn in dialogue.turns:
        for use in turn.uses:
            tool, argument = (use.tool, use.text()) if use.tool else last_call(turn.text, spec)[1:]
            tag = tag_of(tool or "", spec)
            result = use.result or ""
            calls.append(
                CallRecord(
                    role=tag, tool=spec.tool_roles[tag], argument=argument, observation=result, ok=use.ok
                )
            )
    return tuple(calls)


def renamed(dialogue: Dialogue, tools: Mapping[str, str]) -> Dialogue:
    """Return the conversation with renamed tools. Calls of tools with an empty new name are dropped."""
    if not tools:
        return dialogue
    turns = []
    for turn in dialogue.turns:
        uses = tuple(
            replace(use, tool=tools.get(use.tool, use.tool))
            for use in turn.uses
            if tools.get(use.tool, use.tool) or not use.tool
        )
        result = None if turn.uses and not uses else turn.result
        turns.append(replace(turn, uses=uses, result=result))
    return replace(dialogue, turns=tuple(turns))


def as_read(dialogue: Dialogue, spec: AgentSpec) -> Dialogue:
    """Return the conversation with the fences that the agent's code tool needs around its programs."""
    return replace(
        dialogue,
        turns=tuple(
            replace(turn, uses=tuple(_as_read(use, spec) for use in turn.uses)) for turn in dialogue.turns
        ),
    )


def _as_read(use: Use, spec: AgentSpec) -> Use:
    runs = CODE_TOOL in (use.tool, spec.tool_roles.get(use.tool))
    named = isinstance(use.arguments, Mapping) and len(use.arguments) != 1
    return replace(use, arguments=program_argument(use.text())) if runs and not named else use


def with_call(turn: AgentTurn, spec: AgentSpec) -> str:
    """Return the text of a turn with its call in the agent's own form."""
    if not turn.uses or not turn.uses[0].tool:
        return turn.text
    use = turn.uses[0]
    return turn.text + render(Trajectory((Step(tag_of(use.tool, spec), use.text()),)))


def question_in(text: str, spec: AgentSpec) -> str:
    """Return the question without the agent's instruction around it, if it has one."""
    before, mark, after = spec.user_message("\0").partition("\0")
    fits = mark and text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)
    return text[len(before) : len(text) - len(after)] if fits else text


_SAME_TOOL = {"python_interpreter": CODE_TOOL, "visit_webpage": "crawl_page"}
"""Maps tools of smolagents to the tools that do the same here."""


def tag_of(tool: str, spec: AgentSpec) -> str:
    """Return the role that calls ``tool``, which may also be the name of the role. An unknown tool is an error."""
    for tag, name in spec.tool_roles.items():
        if tool in (name, tag):
            return tag
    known = suggestion(tool, spec.tool_roles) if spec.tool_roles else "it has no tools"
    tools = list(spec.tool_roles.values())
    same = [_SAME_TOOL[tool]] if _SAME_TOOL.get(tool) in tools else get_close_matches(tool, tools, n=1)
    command = f"afm convert --tool {tool}="
    rename = f"rename it with {command}{same[0] if same else 'OURS'}, " if tools else ""
    advice = f"; {rename}drop its calls with {command}, or give the agent a role for it"
    raise DataError(f"agent {spec.name!r} has no tool {tool!r}; {known}{advice}")


def _joined(record: Record) -> Iterator[Segment]:
    """Yield the segments with adjacent ones of the same author joined."""
    for author, group in groupby(record.segments, key=attrgetter("author")):
        yield Segment(author, "".join(segment.text for segment in group))


def last_call(text: str, spec: AgentSpec) -> tuple[str, str | None, str]:
    """Split a text that ends with a tool call into the text before it, the tool (``None`` without one) and the argument."""
    parts = split(text, spec)
    if parts.tail or not parts.steps or parts.steps[-1].role not in spec.tool_roles:
        return text, None, ""
    step = parts.steps[-1]
    return text[: step.start], spec.tool_roles[step.role], step.content


def _inner(text: str, spec: AgentSpec) -> str:
    """Return the content of an observation, or any other text unchanged."""
    steps = split(text, spec).steps
    if len(steps) != 1 or steps[0].role != spec.observation_role:
        return text
    return steps[0].content.removeprefix("\n").removesuffix("\n")


_REASONING = re.compile(r"<(?P<close>/?)(?P<tag>think|thinking)>", re.IGNORECASE)
"""Tags of reasoning models around the reasoning before their answer."""


def segments_of(dialogue: Dialogue, spec: AgentSpec, *, missing_thought: str = "") -> tuple[Segment, ...]:
    """Return the trajectory of a conversation in the form of ``spec``.

    Args:
        missing_thought: The thought to write if the agent needs one that the dialogue lacks.

    Raises:
        DataError: The agent does not have a called tool, a result is unknown, or the user asks again.
    """
    writer = _SegmentWriter(spec, missing_thought)
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
    return tuple(writer.segments())


def parted(text: str, spec: AgentSpec) -> tuple[str, str]:
    """Return the tagged reasoning at the beginning of a model's text, and the rest of the text.

    The opening tag may be missing if the chat template writes it. Text in the agent's own roles stays whole.
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


class _SegmentWriter:
    """Joins turns into segments by author."""

    def __init__(self, spec: AgentSpec, missing_thought: str) -> None:
        self._spec, self._missing = spec, missing_thought
        self._segments: list[Segment] = []
        self._tagged = opening_pattern(tuple(spec.roles))
        self._thoughts: list[str] = []
        self._thought = False

    def say(self, turn: AgentTurn, *, last: bool) -> None:
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
        """Add a call and its result, which may only be missing if a result of the whole turn follows."""
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
        """Add words to the next thought. All words until the next role are one thought."""
        if not words.strip():
            return
        if not self._spec.thought_roles:
            raise DataError(
                f"agent {self._spec.name!r} has no thoughts, got words outside of its roles: {words[:_SHOWN]!r}"
            )
        self._thoughts.append(neutralise(words.strip(), self._spec))
        self._thought = True

    def _tags(self, text: str) -> None:
        """Add text of the agent. If it begins with a thought, that thought takes in the pending ones."""
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
