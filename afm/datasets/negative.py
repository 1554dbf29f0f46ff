"""Samples that teach when not to call a tool: tools there or not, needed or not.

The four kinds are Agent-FLAN's negative samples (arXiv 2403.12881) in this project's own format. What is right or
wrong about the world comes from a trajectory or from the rows that are given; only sentences about having no tool are
made by rule.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from afm.agents import START, AgentSpec, AnswerFormat, RoleKind
from afm.agents.toolless import without_tools
from afm.datasets.general import GeneralQuestion
from afm.errors import DataError
from afm.trajectory import Author, Segment, Step, Trajectory, parse, render, validate
from afm.trajectory.answer import read_answer
from afm.trajectory.call_forms import written_calls
from afm.trajectory.parse import tag_pattern
from afm.trajectory.record import Record

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


class NegativeKind(StrEnum):
    """Whether the prompt declares tools, and whether the question needs one."""

    ABSENT_NOT_NEEDED = "absent_not_needed"
    ABSENT_NEEDED = "absent_needed"
    PRESENT_NOT_NEEDED = "present_not_needed"
    PRESENT_NEEDED = "present_needed"


class AbsentAnswer(StrEnum):
    """What follows where a tool is asked for that is not there."""

    ANSWER = "answer"
    """The trajectory's own answer, unless its verdict says that it is wrong."""
    EXPLAIN = "explain"
    """That there is no such tool, and nothing else."""


class DirectAnswer(StrEnum):
    """How a question that needs no tool is answered by an agent that has some."""

    AGENT = "agent"
    """In the agent's functions, on the shortest way to its answer."""
    PLAIN = "plain"
    """As plain text, as in chat."""


class AnswerSource(StrEnum):
    """Where the answer of a sample comes from."""

    TRAJECTORY = "trajectory"
    GIVEN = "given"
    RULE = "rule"


@dataclass(frozen=True, slots=True)
class NegativeSample:
    """One training sample.

    Attributes:
        instruction: The whole user turn.
        output: The whole response.
        system: A system message before it, or empty.
        agent: The agent that the prompt is of; ``None`` for a question asked without any instruction.
    """

    kind: NegativeKind
    instruction: str
    output: str
    answer_from: AnswerSource
    agent: AgentSpec | None
    system: str = ""


@dataclass(frozen=True)
class SampleMaker:
    """Makes samples of one agent; what it makes depends on its settings, the row and the seed alone."""

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
        """The fewest roles from the start to the answer without a tool; empty where a grade would have to be made up.

        Thoughts aside; the answer is the last.
        """
        return _shortest_way(self.spec)

    def of_record(self, record: Record) -> list[NegativeSample]:
        """The samples that a trajectory gives: two, or none where it answered wrongly without a tool.

        Raises:
            DataError: It breaks the rules of the agent, or belongs to another (without location).
        """
        if record.agent != self.spec.name:
            raise DataError(
                f"record {record.id!r} belongs to agent {record.agent!r}, expected {self.spec.name!r}"
            )
        segments = [Segment(part.author, part.text) for part in record.segments]
        if issues := validate(segments, self.spec):
            raise DataError(f"record {record.id!r} breaks the rules of agent {self.spec.name!r}: {issues[0]}")
        steps = parse(record.text, self.spec).steps
        call = next((step for step in steps if step.role in self.spec.tool_roles), None)
        if call is not None:
            return [self._as_it_is(NegativeKind.PRESENT_NEEDED, record), self._asked(record, steps, call)]
        if _is_wrong(record):
            return []
        as_it_is = self._as_it_is(NegativeKind.PRESENT_NOT_NEEDED, record)
        return [self._checked(as_it_is), self._checked(self._without_asking(record, steps))]

    def of_question(self, row: GeneralQuestion) -> list[NegativeSample]:
        """The samples that a question of everyday chat gives: asked of nobody, and of the agent with its tools.

        Raises:
            DataError: Its answer holds a tag of the agent or the form of a tool call (without location).
        """
        for text in (row.question, row.answer):
            if tag := tag_pattern(tuple(self.spec.roles)).search(text):
                raise DataError(f"holds {tag[0]}, a tag of agent {self.spec.name!r}; expected plain text")
        plain = NegativeSample(
            NegativeKind.ABSENT_NOT_NEEDED, row.question, row.answer, AnswerSource.GIVEN, None, row.system
        )
        samples = [self._checked(plain)]
        if self.direct_answer is DirectAnswer.PLAIN or self.direct_way:
            samples.append(self._checked(self._direct(row)))
        return samples

    def _as_it_is(self, kind: NegativeKind, record: Record) -> NegativeSample:
        asked = self.spec.user_message(record.question)
        return NegativeSample(kind, asked, record.text, AnswerSource.TRAJECTORY, self.spec)

    def _asked(self, record: Record, steps: Sequence[Step], call: Step) -> NegativeSample:
        """The question with a wish for the tool that the trajectory called first, where there is none."""
        rng = self._rng(NegativeKind.ABSENT_NEEDED, record.id)
        names = {
            "tool": self.spec.tool_roles[call.role],
            "opening": f"<{call.role}>",
            "closing": f"</{call.role}>",
        }
        question = f"{record.question}\n\n{rng.choice(_REQUESTS).format(**names)}"
        refusal = rng.choice(_REFUSALS).format(**names)
        kind = NegativeKind.ABSENT_NEEDED
        if self.absent_answer is AbsentAnswer.EXPLAIN or _is_wrong(record):
            explained = f"{refusal} {_UNANSWERED}"
            return self._checked(NegativeSample(kind, question, explained, AnswerSource.RULE, None))
        output = self._bare_response(f"{refusal} {_FROM_MEMORY}", steps[-1].content)
        asked = self.bare.user_message(question)
        return self._checked(NegativeSample(kind, asked, output, AnswerSource.TRAJECTORY, self.bare))

    def _without_asking(self, record: Record, steps: Sequence[Step]) -> NegativeSample:
        """A trajectory without a call, by the agent without tools: its last thought and its answer."""
        thoughts = [step.content for step in steps if step.role in self.spec.thought_roles]
        thought = (
            thoughts[-1]
            if thoughts
            else self._rng(NegativeKind.ABSENT_NOT_NEEDED, record.id).choice(_NOT_NEEDED)
        )
        return NegativeSample(
            NegativeKind.ABSENT_NOT_NEEDED,
            self.bare.user_message(record.question),
            self._bare_response(thought, steps[-1].content),
            AnswerSource.TRAJECTORY,
            self.bare,
        )

    def _bare_response(self, thought: str, answer: str) -> str:
        role = self.bare.answer_role
        thinks = bool(self.bare.thought_roles) and not self.bare.roles[role].no_thought
        return render(Trajectory(tuple(_steps(self.bare, role, answer, thought if thinks else None))))

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

    def _checked(self, sample: NegativeSample) -> NegativeSample:
        """``sample`` if it is what it promises: valid for its agent, and without any call."""
        segments = [Segment(Author.AGENT, sample.output)]
        if calls := written_calls(segments, sample.agent or self.bare, original=self.spec):
            raise DataError(
                f"the answer holds the form of a tool call ({calls[0].name or 'a token'}); expected none"
            )
        free = sample.answer_from is AnswerSource.GIVEN and self.direct_answer is DirectAnswer.PLAIN
        if sample.agent is not None and not free and (issues := validate(segments, sample.agent)):
            raise DataError(f"the answer does not fit agent {sample.agent.name!r}: {issues[0]}")
        return sample

    def _rng(self, kind: NegativeKind, identity: str) -> random.Random:
        return random.Random(f"{self.seed}/{kind}/{identity}")


def _is_wrong(record: Record) -> bool:
    return record.verdict is not None and record.verdict.score is not None and record.verdict.score < 1 - 1e-9


def _shortest_way(spec: AgentSpec) -> tuple[str, ...]:
    """Breadth first over the roles whose text can be made by rule."""
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
    """Roles in order, the thought before each that needs one."""
    steps: list[Step] = []
    for role, content in written:
        needed = thought if spec.roles[role].needs_thought else None
        steps += _steps(spec, role, content, needed, prefix="\n" if steps else "")
    return render(Trajectory(tuple(steps)))


def _steps(spec: AgentSpec, role: str, content: str, thought: str | None, prefix: str = "") -> Iterator[Step]:
    if thought is not None:
        yield Step(spec.thought_roles[0], thought, prefix)
        prefix = "\n"
    yield Step(role, content, prefix)


def _in_format(answer: str, spec: AgentSpec) -> str:
    """``answer`` as the agent writes answers.

    Raises:
        DataError: Another answer would be read from it, for example because of its braces.
    """
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
