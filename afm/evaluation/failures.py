"""Why episodes did not pass: each in exactly one class, with examples; and what solved episodes cost."""

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
    """Classes of episodes that did not pass. Where several fit, the first one counts."""

    INFRASTRUCTURE = "infrastructure"
    """Engine or tools failed: no score."""
    ABSTAINED = "abstained"
    """The reward had no verdict: no score."""
    CUT_SHORT = "cut_short"
    """A limit ended the episode before an answer."""
    FORGED_OBSERVATION = "forged_observation"
    """The agent wrote what only the environment may write."""
    NO_ANSWER = "no_answer"
    """The episode ended by itself, without an answer in the agent's format."""
    PARTLY = "partly"
    """The answer is right in parts, where the reward grades in parts."""
    FORMAT_ONLY = "format_only"
    """The answer is right, but the agent's rules are broken."""
    WRONG_AND_FORMAT = "wrong_and_format"
    """The answer is wrong, and the rules are broken."""
    TOOL_ERRORS = "tool_errors"
    """The answer is wrong, and at least half of the tool calls failed."""
    WRONG = "wrong"
    """The answer is wrong, and nothing else is."""


@dataclass(frozen=True, slots=True)
class Example:
    """An episode of a class, as it is in the file: sealed where its benchmark is; the answer is then empty."""

    record: Record
    answer: str


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """All episodes of one class: how they ended, the most frequent first, and a few examples of different questions."""

    kind: Failure
    count: int
    share: float
    stops: dict[str, int]
    examples: tuple[Example, ...]


@dataclass(slots=True)
class _Group:
    count: int = 0
    stops: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Record] = field(default_factory=dict)


class FailureTally:
    """Sorts episodes one by one and keeps a few of each class.

    Args:
        spec: Their agent, or all their agents; without it an episode without an answer counts as wrong.
    """

    def __init__(self, spec: AgentSpec | Agents | None) -> None:
        self._agents = None if spec is None else Agents.of(spec)
        self._groups: dict[Failure, _Group] = {}
        self.episodes = 0

    def add(self, record: Record) -> None:
        """Count one episode as it is in the file."""
        self.episodes += 1
        kind = failure_of(opened(record), self._spec(record))
        if kind is None:
            return
        group = self._groups.setdefault(kind, _Group())
        group.count += 1
        group.stops[record.stop] += 1
        if len(group.examples) < EXAMPLES:
            group.examples.setdefault(task_of(record), record)

    def _spec(self, record: Record) -> AgentSpec | None:
        return None if self._agents is None else self._agents.declared(record)

    def groups(self) -> tuple[FailureGroup, ...]:
        """The classes that occur, the largest first."""
        groups = (
            FailureGroup(
                kind,
                group.count,
                group.count / self.episodes,
                dict(group.stops.most_common()),
                tuple(
                    Example(record, _answer(record, self._spec(record))) for record in group.examples.values()
                ),
            )
            for kind, group in self._groups.items()
        )
        return tuple(sorted(groups, key=lambda group: (-group.count, group.kind)))


def failure_of(record: Record, spec: AgentSpec | None) -> Failure | None:
    """The class of an episode, ``None`` when it passed."""
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
    return " | ".join(answers(record.by_author, spec))


_POINTS = 200


@dataclass(frozen=True, slots=True)
class Scan:
    """What a pass found.

    Attributes:
        failures: Classes of episodes that did not pass.
        tokens: Of budgets, rising: agent and observation tokens of one episode.
        solved: Share of all scored episodes that passed within each budget.
        unjudged: Episodes in which exact match stood in for the model judge.
    """

    failures: tuple[FailureGroup, ...]
    tokens: tuple[float, ...] = ()
    solved: tuple[float, ...] = ()
    unjudged: int = 0


def scan(records: Iterable[Record], spec: AgentSpec | Agents | None) -> Scan:
    """Read ``records`` once, as they stand in the file."""
    failures, spent = FailureTally(spec), array("d")
    scored = unjudged = 0
    for record in records:
        failures.add(record)
        outcome = passed(record)
        if outcome is None:
            continue
        scored += 1
        unjudged += _stood_in(record)
        if outcome:
            spent.append(record.cost.agent_tokens + record.cost.observation_tokens)
    tokens, solved = _within(sorted(spent), scored)
    return Scan(failures.groups(), tokens, solved, unjudged)


def _stood_in(record: Record) -> bool:
    verdict = opened(record).verdict
    return verdict is not None and NO_JUDGE in verdict.evidence


def _within(spent: list[float], scored: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Budgets and shares, at most ``_POINTS`` of them; nothing where no tokens were counted."""
    if not spent or not spent[-1]:
        return (), ()
    places = sorted({round(step * (len(spent) - 1) / (_POINTS - 1)) for step in range(_POINTS)})
    by_budget = {spent[place]: (place + 1) / scored for place in places}
    return tuple(by_budget), tuple(by_budget.values())
