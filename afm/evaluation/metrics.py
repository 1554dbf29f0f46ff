"""Figures of a set of episodes: scores with intervals, and costs.

An episode passes if the score of its reward is at least 1. Episodes without a score are counted separately, never as
wrong: the engine failed or the reward abstained.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import Field

from afm.agents import AgentSpec
from afm.configuration import Settings
from afm.evaluation.agents import Agents
from afm.evaluation.prices import Prices, Spending, Usd
from afm.evaluation.statistics import Agreement, Interval, mean_of_shares, pass_at_k, pass_hat_k, wilson
from afm.evaluation.tallies import (
    AGENT_H,
    AgentHTally,
    ArgumentTally,
    BestOf,
    HallucinationTally,
    UnseenTool,
    VoteTally,
    t_eval_scores,
)
from afm.play import GROUPS_KEY
from afm.rollout.routes import ROUTE_KEY
from afm.trajectory.record import Record


class Metrics(Settings):
    """Figures of one run. Shares are between 0 and 1, ``None`` where nothing could be measured.

    ``scored`` episodes have a score. All shares of right answers are over these. In others the reward ``abstained``, or
    infrastructure failed (``errors``). For the estimates see :mod:`afm.evaluation.statistics`, for the measures
    :mod:`afm.evaluation.tallies`.
    """

    questions: int
    rounds: int
    episodes: int
    scored: int
    abstained: int
    errors: int
    pass_at_1: Interval | None
    """Mean over questions of the share of passed episodes (see :func:`pass_interval`). ``avg_at_k`` is the
    same figure with several rounds."""
    avg_at_k: float | None = None
    pass_at_k: dict[int, float] = Field(default_factory=dict)
    """Chance that at least one of k episodes passes, for several k. Empty for one round. ``pass_hat_k`` is the
    chance that all pass."""
    pass_at_k_intervals: dict[int, Interval] = Field(default_factory=dict)
    pass_hat_k: dict[int, float] = Field(default_factory=dict)
    majority: float | None = None
    """Share of questions whose most frequent answer passes. ``None`` for one round, or without a known
    agent."""
    best_of: tuple[BestOf, ...] = ()
    agreement: tuple[Agreement, ...] = ()
    mean_score: float | None = None
    correct: float | None = None
    format_valid: float | None = None
    """Shares of scored episodes with a right answer, whatever its format, and with a valid format."""
    tool_format_without_tool: float | None = None
    """Share of episodes with a call or the form of one, if no agent has a tool."""
    invented_tool: float | None = None
    """Share of episodes with a call of a tool that the agent does not have. ``invented_tool_calls`` is the
    share of calls."""
    invented_tool_calls: float | None = None
    unseen_argument_errors: dict[str, float] = Field(default_factory=dict)
    """Share of invalid arguments in calls of tools that are declared as unseen, over all and by role."""
    tool_calls: float | None = None
    tool_use: float | None = None
    """Share of episodes with at least one call. ``tool_calls``, ``agent_tokens`` and ``seconds`` are means
    per episode."""
    passed_with_tool: float | None = None
    passed_without_tool: float | None = None
    tool_failure_rate: float | None = None
    agent_tokens: float | None = None
    observation_tokens: float | None = None
    """``None`` if an endpoint did not report its usage. The tokens of ``per_solved`` and ``usd`` are then
    unknown too."""
    seconds: float | None = None
    per_solved: dict[str, float] = Field(default_factory=dict)
    """Tool calls and tokens of all episodes over the number that passed. Empty when none passed."""
    usd: Usd | None = None
    stop_reasons: dict[str, int] = Field(default_factory=dict)
    """Number of episodes by stop reason, without errors."""
    by_source: dict[str, Interval] = Field(default_factory=dict)
    by_group: dict[str, dict[str, Interval]] = Field(default_factory=dict)
    by_agent: dict[str, Metrics] = Field(default_factory=dict)
    """pass@1 by data source, by level, topic and similar fields, and all figures by key in ``agents:``, if
    there are several."""
    score_by_source: dict[str, float] = Field(default_factory=dict)
    t_eval: dict[str, float] = Field(default_factory=dict)
    agent_h: dict[str, float] = Field(default_factory=dict)

    def __repr_args__(self) -> Iterable[tuple[str, Any]]:
        """Yield the main figures."""
        names = ("questions", "rounds", "scored", "pass_at_1", "correct", "format_valid", "tool_calls")
        return [(name, getattr(self, name)) for name in names]


_TOKENS = ("agent_tokens", "observation_tokens")
_SOURCE = ""
"""Key of the data source among the fields of a question."""
_MOST_GROUPS = 60
"""Limit on the values of a field. With more, nearly every question is its own group."""
_OWN_CHATS = ("t_eval_", AGENT_H)
"""Data whose chats name their own tools, which the agent does not declare."""


def task_of(record: Record) -> str:
    """Return the task of an episode. All rounds of a question share it."""
    return str(record.provenance.get("task", record.id))


def passed(record: Record) -> bool | None:
    """Whether an episode passed. ``None`` without a score."""
    if record.error or record.verdict is None or record.verdict.score is None:
        return None
    return record.verdict.score >= 1 - 1e-9


class Tally:
    """Adds up episodes and keeps a few numbers of each. Their order does not matter.

    Args:
        agents: Agents of the episodes. Needed to count invented tools and votes.
        unseen: Tools that are new to the model. Their arguments are checked.
        prices: Prices of tokens and calls. Needed to count dollars.
        split: Whether to keep figures by agent too, where records name theirs.
    """

    def __init__(
        self,
        agents: Agents | None = None,
        *,
        unseen: Mapping[str, UnseenTool] | None = None,
        prices: Prices | None = None,
        split: bool = True,
    ) -> None:
        self._part = partial(Tally, agents, unseen=unseen, prices=prices, split=False) if split else None
        self._parts: dict[str, Tally] = {}
        self._money = Spending(prices) if prices else None
        self._arguments = ArgumentTally(unseen) if unseen else None
        self._hallucination = HallucinationTally(agents) if agents else None
        self._votes = VoteTally(agents) if agents else None
        self._agent_h = AgentHTally()
        self._outcomes: defaultdict[str, list[bool]] = defaultdict(list)
        self._fields: dict[str, Mapping[str, str]] = {}
        self._values: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self._scores: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self._tool_failures = 0
        self._stops: Counter[str] = Counter()
        self._metered = True
        self.episodes = 0
        self.scored = 0
        self.abstained = 0
        self.errors = 0
        self.passed = 0

    @property
    def failed(self) -> int:
        """Number of episodes without a score."""
        return self.abstained + self.errors

    def add(self, record: Record) -> None:
        """Count one episode."""
        self.episodes += 1
        task = task_of(record)
        if self._part is not None and (name := record.provenance.get(ROUTE_KEY)):
            if name not in self._parts:
                self._parts[name] = self._part()
            self._parts[name].add(record)
        self._fields[task] = {_SOURCE: record.data_source, **record.provenance.get(GROUPS_KEY, {})}
        if record.error:
            self.errors += 1
            return
        self._add_cost(record)
        if self._hallucination is not None and not record.data_source.startswith(_OWN_CHATS):
            self._hallucination.add(record)
        if self._arguments is not None:
            self._arguments.add(record)
        outcome = passed(record)
        if self._money is not None:
            self._money.add(task, record, passed=bool(outcome))
        if outcome is None or record.verdict is None:
            self.abstained += 1
            return
        self._agent_h.add(record)
        self.scored += 1
        self.passed += outcome
        if self._votes is not None:
            self._votes.add(task, record, passed=outcome)
        self._outcomes[task].append(outcome)
        score, parts = record.verdict.score or 0.0, record.verdict.parts
        self._add("passed_with_tool" if record.cost.tool_calls else "passed_without_tool", outcome)
        self._add("mean_score", score)
        self._scores[record.data_source].append(score)
        for part, name in (("correct", "correct"), ("format", "format_valid")):
            if part in parts:
                self._add(name, parts[part])

    def _add(self, name: str, value: float) -> None:
        """Add a value to a mean of :class:`Metrics`."""
        self._values[name].append(value)

    def _add_cost(self, record: Record) -> None:
        cost = record.cost
        self._stops[record.stop] += 1
        self._metered &= not cost.unmetered
        self._add("tool_calls", cost.tool_calls)
        self._add("tool_use", cost.tool_calls > 0)
        self._tool_failures += cost.tool_failures
        self._add("agent_tokens", cost.agent_tokens)
        self._add("observation_tokens", cost.observation_tokens)
        self._add("seconds", cost.wall_seconds)

    def metrics(self, *, seed: int = 0) -> Metrics:
        """Return the figures so far. ``seed`` is for the bootstrap."""
        rounds = max(map(len, self._outcomes.values()), default=0)
        interval = pass_interval(self._outcomes, seed=seed) if self._outcomes else None
        unknown = () if self._metered else _TOKENS
        sums = {name: math.fsum(values) for name, values in self._values.items() if name not in unknown}
        calls = sums.get("tool_calls")
        by_source = {name: math.fsum(scores) / len(scores) for name, scores in sorted(self._scores.items())}
        over_k = _over_k(pass_at_k, self._outcomes, rounds)
        by_field = self._by_field(seed)
        return Metrics(
            questions=len(self._fields),
            rounds=rounds,
            episodes=self.episodes,
            scored=self.scored,
            abstained=self.abstained,
            errors=self.errors,
            pass_at_1=interval,
            avg_at_k=interval.value if interval and rounds > 1 else None,
            pass_at_k={k: _mean(shares) for k, shares in over_k.items()},
            pass_at_k_intervals={k: mean_of_shares(shares, seed=seed) for k, shares in over_k.items()},
            pass_hat_k={
                k: _mean(shares) for k, shares in _over_k(pass_hat_k, self._outcomes, rounds).items()
            },
            majority=self._votes.share() if self._votes and rounds > 1 else None,
            **{name: total / len(self._values[name]) for name, total in sums.items()},
            **(self._hallucination.figures() if self._hallucination else {}),
            unseen_argument_errors=self._arguments.shares() if self._arguments is not None else {},
            tool_failure_rate=self._tool_failures / calls if calls else None,
            per_solved={
                name: sums[name] / self.passed
                for name in ("tool_calls", *_TOKENS)
                if self.passed and name in sums
            },
            usd=self._money.usd(seed=seed) if self._money and self._metered else None,
            stop_reasons=dict(sorted(self._stops.items())),
            by_source=by_field.pop(_SOURCE, {}),
            by_group=by_field,
            by_agent={name: part.metrics(seed=seed) for name, part in sorted(self._parts.items())},
            score_by_source=by_source,
            t_eval=t_eval_scores(by_source),
            agent_h=self._agent_h.figures(),
        )

    def _by_field(self, seed: int) -> dict[str, dict[str, Interval]]:
        """Return pass@1 by data source, and by each field of the rows that has several values."""
        fields: defaultdict[str, defaultdict[str, dict[str, list[bool]]]]
        fields = defaultdict(lambda: defaultdict(dict))
        for task, outcomes in self._outcomes.items():
            for field, name in self._fields[task].items():
                fields[field][name][task] = outcomes
        return {
            field: {name: pass_interval(group, seed=seed) for name, group in sorted(groups.items())}
            for field, groups in sorted(fields.items())
            if len(groups) > 1 and (field == _SOURCE or len(groups) <= _MOST_GROUPS)
        }


def summarise(
    records: Iterable[Record],
    *,
    seed: int = 0,
    spec: AgentSpec | Agents | None = None,
    original: AgentSpec | None = None,
    prices: Prices | None = None,
) -> Metrics:
    """Return the figures of all ``records``.

    Args:
        spec: Their agent, or all their agents. Needed to count invented tools.
        original: The agent with its tools, if ``spec`` is the same agent without them.
        prices: Prices of tokens and calls. Needed to count dollars.
    """
    tally = Tally(Agents.of(spec, original) if spec else None, prices=prices)
    for record in records:
        tally.add(record)
    return tally.metrics(seed=seed)


def pass_interval(outcomes: Mapping[str, Sequence[bool]], *, seed: int = 0) -> Interval:
    """Return pass@1 over the scored episodes of at least one question.

    With one round it has Wilson's interval. With several it has the percentile bootstrap over questions, because the
    rounds of a question are not independent. If all questions have the same share, a bootstrap would have no width.
    Then Wilson's interval over the questions is used.
    """
    shares = [_mean(rounds) for rounds in outcomes.values()]
    if max(map(len, outcomes.values())) == 1:
        return wilson(math.fsum(shares), len(shares))
    return mean_of_shares(shares, seed=seed)


def _over_k(
    estimate: Callable[[int, int, int], float], outcomes: Mapping[str, Sequence[bool]], rounds: int
) -> dict[int, list[float]]:
    """Return the estimates of all questions with at least k episodes, for each k up to 16, powers of two, and all rounds."""
    if rounds < 2:
        return {}
    chosen = {k for k in range(1, rounds + 1) if k <= 16 or k & (k - 1) == 0 or k == rounds}
    return {
        k: [estimate(sum(done), len(done), k) for done in outcomes.values() if len(done) >= k]
        for k in sorted(chosen)
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
