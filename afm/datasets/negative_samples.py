"""Samples that teach when not to call a tool: with and without tools, needed and not needed.

The four kinds are Agent-FLAN's negative samples (arXiv 2403.12881) in this project's format. All facts come from a
trajectory or the given rows. Rules write only the sentences about absent tools.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from afm.agents import START, AgentSpec, AnswerFormat, RoleKind
from afm.agents.load import without_tools
from afm.errors import DataError, json_word
from afm.tools.registry import faults_of
from afm.trajectory import Author, Segment, Step, Trajectory, parse, render, validate
from afm.trajectory.answer import read_answer
from afm.trajectory.call_forms import written_calls
from afm.trajectory.chat import content_text, message_list, row_id
from afm.trajectory.record import Record
from afm.trajectory.tags import tag_pattern

_REQUESTS = (
    "Use the {tool} tool for this.",
    "Look at this with {tool} before you answer, and write the call as {opening}...{closing}.",
    "Answer in this format:\nThought: what to do next\nAction: {tool}\nAction Input: its argument",
    'Call the function as JSON: {{"name": "{tool}", "arguments": {{...}}}}',
)
_REFUSALS = (
    "I have no tool {tool} here, so I cannot call it.",
    "No tool is offered to me here, neither {tool} nor another, so there is nothing I could call.",
    "{tool} was asked for, but no tool is available in this conversation.",
    "There is no {tool} to call here; whatever I wrote in that form would not be carried out.",
)
_FROM_MEMORY = "I answer without it, from what I know."
_UNANSWERED = "I can neither look the answer up nor compute it with it, and I will not make up a result."
_NOT_NEEDED = (
    "This needs no tool; I can answer it directly.",
    "Nothing has to be looked up or run for this.",
    "I can answer this without a tool.",
)


@dataclass(frozen=True, slots=True)
class GeneralQuestion:
    """One question of everyday chat with its answer and the system message before it."""

    id: str
    question: str
    answer: str
    system: str = ""


class NegativeKind(StrEnum):
    """Whether the prompt declares tools, and whether the question needs one."""

    ABSENT_NOT_NEEDED = "absent_not_needed"
    ABSENT_NEEDED = "absent_needed"
    PRESENT_NOT_NEEDED = "present_not_needed"
    PRESENT_NEEDED = "present_needed"


class AbsentAnswer(StrEnum):
    """The response to a request for an absent tool."""

    ANSWER = "answer"
    """The trajectory's own answer, unless its verdict is wrong."""
    EXPLAIN = "explain"
    """Only the statement that the tool is absent."""


class DirectAnswer(StrEnum):
    """The form of an answer that needs no tool, by an agent with tools."""

    AGENT = "agent"
    """The agent's tags, on the shortest way to its answer."""
    PLAIN = "plain"
    """Plain text, as in chat."""


class AnswerSource(StrEnum):
    """The source of a sample's answer."""

    TRAJECTORY = "trajectory"
    GIVEN = "given"
    RULE = "rule"


@dataclass(frozen=True, slots=True)
class NegativeSample:
    """One training sample: the whole user turn and the whole response.

    Attributes:
        agent: The agent of the prompt. ``None`` for a question without any instruction.
    """

    kind: NegativeKind
    instruction: str
    output: str
    answer_from: AnswerSource
    agent: AgentSpec | None
    system: str = ""


@dataclass(frozen=True)
class SampleMaker:
    """Makes samples of one agent. They depend only on its settings, the row and the seed."""

    spec: AgentSpec
    seed: int = 0
    absent_answer: AbsentAnswer = AbsentAnswer.ANSWER
    direct_answer: DirectAnswer = DirectAnswer.AGENT

    @cached_property
    def bare(self) -> AgentSpec:
        """The agent without its tools."""
        return without_tools(self.spec)

    @cached_property
    def direct_way(self) -> tuple[str, ...]:
        """The fewest roles from the start to an answer without a tool. Empty if there is no way."""
        return _shortest_way(self.spec)

    @cached_property
    def is_silent(self) -> bool:
        """Whether the agent's prompt is only the question, so that a question without a prompt is the agent's."""
        return self.spec.user_message("?") == "?"

    def of_record(self, record: Record) -> list[NegativeSample]:
        """Return the samples of a trajectory: two, or none if it answered wrongly without a tool.

        There is only one if the explanation would need a question without a prompt, which is the agent's own prompt.

        Raises:
            DataError: The trajectory breaks the agent's rules or belongs to another agent (without location).
        """
        if record.agent != self.spec.name:
            raise DataError(
                f"record {record.id!r} belongs to agent {record.agent!r}, expected {self.spec.name!r}"
            )
        segments = record.segments
        if issues := faults_of(segments, self.spec):
            raise DataError(f"record {record.id!r} breaks the rules of agent {self.spec.name!r}: {issues[0]}")
        steps = parse(record.text, self.spec).steps
        call = next((step for step in steps if step.role in self.spec.tool_roles), None)
        if call is not None:
            as_it_is = self._as_it_is(NegativeKind.PRESENT_NEEDED, record)
            explains = self.absent_answer is AbsentAnswer.EXPLAIN or _is_wrong(record)
            if explains and self.is_silent:
                return [as_it_is]
            return [as_it_is, self._ask_without_tools(record, steps, call, explains)]
        if _is_wrong(record):
            return []
        as_it_is = self._as_it_is(NegativeKind.PRESENT_NOT_NEEDED, record)
        return [self._check(as_it_is), self._check(self._without_asking(record, steps))]

    def of_question(self, row: GeneralQuestion) -> list[NegativeSample]:
        """Return the samples of a question of everyday chat: one without a prompt, and one of the agent with its tools.

        If the agent has no prompt of its own, the first sample is of the agent without its tools.

        Raises:
            DataError: The answer contains a tag of the agent or the form of a tool call (without location).
        """
        for text in (row.question, row.answer):
            if tag := tag_pattern(tuple(self.spec.roles)).search(text):
                raise DataError(f"holds {tag[0]}, a tag of agent {self.spec.name!r}; expected plain text")
        samples = [self._check(self._absent(row))]
        if self.direct_answer is DirectAnswer.PLAIN or self.direct_way:
            samples.append(self._check(self._direct(row)))
        return samples

    def _as_it_is(self, kind: NegativeKind, record: Record) -> NegativeSample:
        asked = self.spec.user_message(record.question)
        return NegativeSample(kind, asked, record.text, AnswerSource.TRAJECTORY, self.spec)

    def _ask_without_tools(
        self, record: Record, steps: Sequence[Step], call: Step, explains: bool
    ) -> NegativeSample:
        """Make a sample that asks for the tool that the trajectory called first, without offering it."""
        rng = self._rng(NegativeKind.ABSENT_NEEDED, record.identity)
        names = {
            "tool": self.spec.tool_roles[call.role],
            "opening": f"<{call.role}>",
            "closing": f"</{call.role}>",
        }
        question = f"{record.question}\n\n{rng.choice(_REQUESTS).format(**names)}"
        refusal = rng.choice(_REFUSALS).format(**names)
        kind = NegativeKind.ABSENT_NEEDED
        if explains:
            explained = f"{refusal} {_UNANSWERED}"
            return self._check(NegativeSample(kind, question, explained, AnswerSource.RULE, None))
        output = _thought_and_answer(self.bare, f"{refusal} {_FROM_MEMORY}", steps[-1].content)
        asked = self.bare.user_message(question)
        return self._check(NegativeSample(kind, asked, output, AnswerSource.TRAJECTORY, self.bare))

    def _without_asking(self, record: Record, steps: Sequence[Step]) -> NegativeSample:
        """Make a sample of a trajectory without calls, by the agent without tools: last thought and answer."""
        thoughts = [step.content for step in steps if step.role in self.spec.thought_roles]
        thought = (
            thoughts[-1]
            if thoughts
            else self._rng(NegativeKind.ABSENT_NOT_NEEDED, record.identity).choice(_NOT_NEEDED)
        )
        return NegativeSample(
            NegativeKind.ABSENT_NOT_NEEDED,
            self.bare.user_message(record.question),
            _thought_and_answer(self.bare, thought, steps[-1].content),
            AnswerSource.TRAJECTORY,
            self.bare,
        )

    def _absent(self, row: GeneralQuestion) -> NegativeSample:
        kind = NegativeKind.ABSENT_NOT_NEEDED
        if not self.is_silent:
            return NegativeSample(kind, row.question, row.answer, AnswerSource.GIVEN, None, row.system)
        sentence = self._rng(kind, row.id).choice(_NOT_NEEDED)
        output = _thought_and_answer(self.bare, sentence, _in_format(row.answer, self.bare))
        asked = self.bare.user_message(row.question)
        return NegativeSample(kind, asked, output, AnswerSource.GIVEN, self.bare, row.system)

    def _direct(self, row: GeneralQuestion) -> NegativeSample:
        kind = NegativeKind.PRESENT_NOT_NEEDED
        output = row.answer
        if self.direct_answer is DirectAnswer.AGENT:
            sentence = self._rng(kind, row.id).choice(_NOT_NEEDED)
            answer = _in_format(row.answer, self.spec)
            written = [(role, sentence) for role in self.direct_way[:-1]] + [(self.direct_way[-1], answer)]
            output = _in_roles(self.spec, written, sentence)
        asked = self.spec.user_message(row.question)
        return NegativeSample(kind, asked, output, AnswerSource.GIVEN, self.spec, row.system)

    def _check(self, sample: NegativeSample) -> NegativeSample:
        """Return ``sample`` if it is valid for its agent and contains no call, else raise an error."""
        segments = [Segment(Author.AGENT, sample.output)]
        if calls := written_calls(segments, sample.agent or self.bare, original=self.spec):
            raise DataError(
                f"the answer holds the form of a tool call ({calls[0].name or 'a token'}); expected none"
            )
        given_to_agent = sample.answer_from is AnswerSource.GIVEN and sample.agent is self.spec
        free = given_to_agent and self.direct_answer is DirectAnswer.PLAIN
        if sample.agent is not None and not free and (issues := validate(segments, sample.agent)):
            raise DataError(f"the answer does not fit agent {sample.agent.name!r}: {issues[0]}")
        return sample

    def _rng(self, kind: NegativeKind, identity: str) -> random.Random:
        return random.Random(f"{self.seed}/{kind}/{identity}")


def _is_wrong(record: Record) -> bool:
    return record.verdict is not None and record.verdict.score is not None and record.verdict.score < 1 - 1e-9


def general_question(row: Any, *, default_id: str) -> GeneralQuestion:
    """Read ``{question, answer}`` or OpenAI's ``{messages: [{role, content}]}``.

    Of several answers, the first counts. Of a conversation, the first question and its reply count.

    Raises:
        DataError: The row has another layout, a text is empty, or the reply calls a tool (without location).
    """
    if not isinstance(row, Mapping):
        raise DataError(f"got {json_word(row)}, expected an object")
    system, question, answer = None, row.get("question"), row.get("answer")
    if "messages" in row:
        system, question, answer = _first_exchange(message_list(row, "messages", content_key=None))
    elif isinstance(answer, list) and answer:
        answer = answer[0]
    texts = {"question": question, "answer": answer} | ({} if system is None else {"system": system})
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{name}: got {str(text)[:40]!r}, expected a text that is not empty")
    return GeneralQuestion(row_id(row) or default_id, str(question), str(answer), system or "")


def _first_exchange(messages: Sequence[Mapping[str, Any]]) -> tuple[str | None, str, str]:
    """Return system prompt (``None`` without one), question and reply."""
    system = None
    if messages[0]["role"] in ("system", "developer"):
        system, messages = content_text(messages[0]), messages[1:]
    roles = [message["role"] for message in messages[:2]]
    if roles != ["user", "assistant"]:
        raise DataError(f"messages: begins with the turns {roles}, expected user, then assistant")
    asked, replied = messages[:2]
    if replied.get("tool_calls") or replied.get("function_call"):
        raise DataError("messages: the first reply calls a tool; expected a question that needs no tool")
    return system, content_text(asked), content_text(replied)


def _shortest_way(spec: AgentSpec) -> tuple[str, ...]:
    """Return the fewest roles from the start to the answer without a tool, except thoughts. The answer is the last.

    Empty if every way passes a grading role, because its grade would have to be invented.
    """
    ways: deque[tuple[str, ...]] = deque((role,) for role in spec.transitions[START])
    seen: set[str] = set()
    while ways:
        way = ways.popleft()
        role = spec.roles[way[-1]]
        if role.kind is RoleKind.ANSWER:
            return way
        if way[-1] in seen or role.kind is RoleKind.TOOL or role.grade is not None:
            continue
        seen.add(way[-1])
        ways.extend((*way, follower) for follower in spec.transitions[way[-1]])
    return ()


def _in_roles(spec: AgentSpec, written: Sequence[tuple[str, str]], thought: str) -> str:
    """Write the roles in order, with the thought before each that needs one."""
    steps: list[Step] = []
    for role, content in written:
        needed = thought if spec.roles[role].needs_thought else None
        steps += _steps(spec, role, content, needed, prefix="\n" if steps else "")
    return render(Trajectory(tuple(steps)))


def _thought_and_answer(spec: AgentSpec, thought: str, answer: str) -> str:
    """Return the answer, after the thought if the agent may think before it."""
    role = spec.answer_role
    thinks = bool(spec.thought_roles) and not spec.roles[role].no_thought
    return render(Trajectory(tuple(_steps(spec, role, answer, thought if thinks else None))))


def _steps(spec: AgentSpec, role: str, content: str, thought: str | None, prefix: str = "") -> Iterator[Step]:
    if thought is not None:
        yield Step(spec.thought_roles[0], thought, prefix)
        prefix = "\n"
    yield Step(role, content, prefix)


def _in_format(answer: str, spec: AgentSpec) -> str:
    """Write ``answer`` in the agent's format. It is an error if reading it back gives another answer (braces)."""
    content = _wrapped(answer, spec)
    read = read_answer(content, spec)
    if spec.answer_separator is None and [part.strip() for part in read] != [answer.strip()]:
        wanted = f"{spec.answer_format.value!r} of agent {spec.name!r}"
        raise DataError(f"the answer cannot be written in the format {wanted}: it would read {read}")
    return content


def _wrapped(answer: str, spec: AgentSpec) -> str:
    if spec.answer_format is AnswerFormat.BOXED:
        return f"\\boxed{{{answer}}}"
    if spec.answer_format is AnswerFormat.FENCE:
        longest = max((len(run) for run in re.findall(r"`+", answer)), default=0)
        fence = "`" * max(3, longest + 1)
        return f"\n{fence}text\n{answer}\n{fence}\n"
    return answer
