"""Short responses in the functions of an agent, written from a thought and an answer that are given."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence

from afm.agents import START, AgentSpec, AnswerFormat, RoleKind
from afm.errors import DataError
from afm.trajectory import Step, Trajectory, render
from afm.trajectory.answer import read_answer


def shortest_way(spec: AgentSpec) -> tuple[str, ...]:
    """The fewest roles from the start to the answer without a tool, thoughts aside; the answer is the last.

    Empty where there is no such way but through a role that grades, since its grade would have to be made up.
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


def in_roles(spec: AgentSpec, written: Sequence[tuple[str, str]], thought: str) -> str:
    """Roles in order, the thought before each that needs one."""
    steps: list[Step] = []
    for role, content in written:
        needed = thought if spec.roles[role].needs_thought else None
        steps += _steps(spec, role, content, needed, prefix="\n" if steps else "")
    return render(Trajectory(tuple(steps)))


def thought_and_answer(spec: AgentSpec, thought: str, answer: str) -> str:
    """The answer and, where the agent may think before it, the thought."""
    role = spec.answer_role
    thinks = bool(spec.thought_roles) and not spec.roles[role].no_thought
    return render(Trajectory(tuple(_steps(spec, role, answer, thought if thinks else None))))


def _steps(spec: AgentSpec, role: str, content: str, thought: str | None, prefix: str = "") -> Iterator[Step]:
    if thought is not None:
        yield Step(spec.thought_roles[0], thought, prefix)
        prefix = "\n"
    yield Step(role, content, prefix)


def in_format(answer: str, spec: AgentSpec) -> str:
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
