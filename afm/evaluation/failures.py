"""Why episodes did not pass: each in exactly one class, with examples. And the budgets that solved episodes need."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from afm.agents import AgentSpec
from afm.evaluation.agents import Agents
from afm.evaluation.metrics import passed, task_of
from afm.rewards.judge import NO_JUDGE
from afm.trajectory import answers
from afm.trajectory.record import Record, StopReason, opened

EXAMPLES = 3
_WHOLE = 1 - 1e-9
_LIMITS = frozenset(
    {
        StopReason.TURNS,
        StopReason.AGENT_TOKENS,
        StopReason.RESPONSE_TOKENS,
        StopReason.SECONDS,
        StopReason.TOOL_SECONDS,
    }
)


class Failure(StrEnum):
    """Classes of episodes that did not pass, each with a label and a sentence. The first that fits counts."""

    label: str
    meaning: str

    def __new__(cls, value: str, label: str, meaning: str) -> Failure:
        """Make a member that equals its value as text."""
        member = str.__new__(cls, value)
        member._value_, member.label, member.meaning = value, label, meaning
        return member

    INFRASTRUCTURE = (
        "infrastructure",
        "No score: engine or tools failed",
        "Not counted as wrong. Run again to repeat them.",
    )
    ABSTAINED = (
        "abstained",
        "No score: the reward abstained",
        "The judge or the checker gave no verdict. Not counted as wrong.",
    )
    CUT_SHORT = (
        "cut_short",
        "Cut off by a limit",
        "The limit of tool calls, tokens or seconds was reached before an answer.",
    )
    FORGED_OBSERVATION = (
        "forged_observation",
        "Forged observation",
        "The agent wrote text that only the environment may write, which ends an episode.",
    )
    NO_ANSWER = (
        "no_answer",
        "No answer",
        "The model ended the episode without an answer in the agent's format.",
    )
    PARTLY = "partly", "Partly right", "The reward grades several parts, and not all are right."
    FORMAT_ONLY = (
        "format_only",
        "Right answer, broken format",
        "The answer is right, but the response breaks the agent's format.",
    )
    WRONG_AND_FORMAT = (
        "wrong_and_format",
        "Wrong answer, broken format",
        "The answer is wrong, and the response breaks the agent's format.",
    )
    TOOL_ERRORS = "tool_errors", "Wrong answer after tool errors", "At least half of the tool calls failed."
    WRONG = "wrong", "Wrong answer", "The format is valid and the tools worked."


@dataclass(frozen=True, slots=True)
class Example:
    """An episode of a class, as it is in the file. It is sealed if its benchmark is, and its answer is then empty."""

    record: Record
    answer: str


@dataclass(slots=True)
class FailureGroup:
    """All episodes of one class: how they stopped, and a few examples by question."""

    kind: Failure
    count: int = 0
    share: float = 0.0
    stops: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Example] = field(default_factory=dict)


def failure_of(record: Record, spec: AgentSpec | None) -> Failure | None:
    """Return the class of an episode, ``None`` if it passed."""
    if record.error:
        return Failure.INFRASTRUCTURE
    outcome = passed(record)
    if outcome is None or record.verdict is None:
        return Failure.ABSTAINED
    return None if outcome else _class_of_failed(record, record.verdict.parts, spec)


def _class_of_failed(record: Record, parts: dict[str, float], spec: AgentSpec | None) -> Failure:
    answered = record.stop is StopReason.ANSWER if spec is None else bool(_answer(record, spec))
    answered = answered or parts.get("format", 0.0) >= _WHOLE
    if not answered and record.stop in _LIMITS:
        return Failure.CUT_SHORT
    if record.stop is StopReason.FORGED_OBSERVATION:
        return Failure.FORGED_OBSERVATION
    if not answered and spec is not None:
        return Failure.NO_ANSWER
    if 0 < parts.get("correct", 0.0) < _WHOLE:
        return Failure.PARTLY
    if parts.get("correct", 0.0) >= _WHOLE:
        return Failure.FORMAT_ONLY
    if parts.get("format", 1.0) < _WHOLE:
        return Failure.WRONG_AND_FORMAT
    calls = record.cost.tool_calls
    if calls and 2 * record.cost.tool_failures >= calls:
        return Failure.TOOL_ERRORS
    return Failure.WRONG


def _answer(record: Record, spec: AgentSpec | None) -> str:
    if spec is None:
        return ""
    return " | ".join(answers(record.segments, spec))


_POINTS = 200


@dataclass(frozen=True, slots=True)
class Scan:
    """The results of one pass over the episodes of a run.

    Attributes:
        failures: Classes of episodes that did not pass, the largest first.
        tokens: Budgets in rising order: agent and observation tokens of one episode.
        solved: Share of all scored episodes that passed within each budget.
        unjudged: Episodes in which exact match replaced the model judge.
    """

    failures: tuple[FailureGroup, ...]
    tokens: tuple[float, ...] = ()
    solved: tuple[float, ...] = ()
    unjudged: int = 0


def scan(records: Iterable[Record], spec: AgentSpec | Agents | None) -> Scan:
    """Read ``records`` once, in the order of the file.

    Args:
        spec: Their agent, or all their agents. Without it an episode without an answer counts as wrong.
    """
    agents = None if spec is None else Agents.of(spec)
    groups: dict[Failure, FailureGroup] = {}
    spent = array("d")
    episodes = scored = unjudged = 0
    for written in records:
        record, declared = opened(written), agents.declared(written) if agents else None
        episodes += 1
        if (kind := failure_of(record, declared)) is not None:
            group = groups.setdefault(kind, FailureGroup(kind))
            group.count += 1
            group.stops[record.stop] += 1
            if len(group.examples) < EXAMPLES:
                group.examples.setdefault(task_of(written), Example(written, _answer(written, declared)))
        if record.verdict is None or (outcome := passed(record)) is None:
            continue
        scored += 1
        unjudged += NO_JUDGE in record.verdict.evidence
        if outcome:
            spent.append(record.cost.agent_tokens + record.cost.observation_tokens)
    for group in groups.values():
        group.share = group.count / episodes
    failures = sorted(groups.values(), key=lambda group: (-group.count, group.kind))
    return Scan(tuple(failures), *_within(sorted(spent), scored), unjudged)


def _within(spent: list[float], scored: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return at most ``_POINTS`` budgets and shares. Both are empty if no tokens were counted."""
    if not spent or not spent[-1]:
        return (), ()
    places = sorted({round(step * (len(spent) - 1) / (_POINTS - 1)) for step in range(_POINTS)})
    by_budget = {spent[place]: (place + 1) / scored for place in places}
    return tuple(by_budget), tuple(by_budget.values())
