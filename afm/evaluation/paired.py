"""The difference between two runs on their common questions, and the savings of a model against a team."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple, TypeVar

from pydantic import Field

from afm.configuration import Settings
from afm.errors import DataError
from afm.evaluation.metrics import passed, task_of
from afm.evaluation.prices import Prices
from afm.evaluation.statistics import (
    RESAMPLES,
    Interval,
    PairedTest,
    bootstrap_mean,
    bootstrap_quotient,
    holm,
    paired_p,
    wilson,
)
from afm.trajectory.record import Record

DifferenceT = TypeVar("DifferenceT", bound="Difference")


class Difference(Settings):
    """The difference between the second run and the first, on the questions that have a score in both."""

    questions: int
    difference: Interval
    """Mean over questions of the pass share of the second run minus that of the first. ``gained`` questions went
    better, ``lost`` worse."""
    gained: int
    lost: int
    p_value: float
    """Two-sided p-value of no difference (:func:`afm.evaluation.statistics.paired_p`)."""
    test: PairedTest
    p_holm: float | None = None
    """The p-value with Holm's correction for several comparisons. ``None`` for a single one."""


class PairedDifference(Difference):
    """A difference, and the differences by data source, corrected for their number."""

    by_source: dict[str, Difference] = Field(default_factory=dict)


def paired_difference(
    first: Iterable[Record], second: Iterable[Record], *, resamples: int = RESAMPLES, seed: int = 0
) -> PairedDifference:
    """Return the difference of ``second`` to ``first`` on the same questions, with an interval over questions and a p-value.

    Raises:
        DataError: No question has a score in both, or an id belongs to different questions.
    """
    before, after = _shares(first), _shares(second)
    common = sorted(before.keys() & after.keys())
    if not common:
        raise DataError("the two runs have no scored question in common; expected runs on the same tasks")
    for task in common:
        if before[task].question != after[task].question:
            raise DataError(f"task {task!r} is another question in the second run; expected the same tasks")
    changes = {task: after[task].share - before[task].share for task in common}
    sources: defaultdict[str, list[Fraction]] = defaultdict(list)
    for task, change in changes.items():
        sources[before[task].source].append(change)
    whole = _difference(list(changes.values()), resamples, seed)
    parts = [_difference(group, resamples, seed) for _, group in sorted(sources.items())]
    corrected = holm_corrected(parts) if len(parts) > 1 else []
    return PairedDifference(
        **whole.model_dump(), by_source=dict(zip(sorted(sources), corrected, strict=False))
    )


def holm_corrected(differences: Sequence[DifferenceT]) -> list[DifferenceT]:
    """Return the differences with ``p_holm``, the p-value corrected for their number."""
    corrected = holm([difference.p_value for difference in differences])
    return [
        difference.model_copy(update={"p_holm": p})
        for difference, p in zip(differences, corrected, strict=True)
    ]


def _difference(changes: Sequence[Fraction], resamples: int, seed: int) -> Difference:
    p_value, test = paired_p(changes, seed=seed)
    return Difference(
        questions=len(changes),
        difference=difference_interval([float(change) for change in changes], resamples=resamples, seed=seed),
        gained=sum(change > 0 for change in changes),
        lost=sum(change < 0 for change in changes),
        p_value=p_value,
        test=test,
    )


def difference_interval(changes: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the interval of the mean change of the pass share, by bootstrap over questions.

    If all questions change alike, a bootstrap would have no width. The interval is then as wide as Wilson's for n of n.
    """
    if len(set(changes)) > 1:
        return bootstrap_mean(changes, resamples=resamples, seed=seed)
    width = 1 - wilson(len(changes), len(changes)).low
    value = changes[0]
    return Interval(value=value, low=max(-1.0, value - width), high=min(1.0, value + width))


class _Question(NamedTuple):
    """Hash of the question, data source, and the share of its scored episodes that passed."""

    question: int
    source: str
    share: Fraction


def _shares(records: Iterable[Record]) -> dict[str, _Question]:
    """Return the questions by task."""
    outcomes: defaultdict[str, list[bool]] = defaultdict(list)
    questions: dict[str, tuple[int, str]] = {}
    for record in records:
        outcome = passed(record)
        if outcome is not None:
            outcomes[task_of(record)].append(outcome)
            questions[task_of(record)] = (hash(record.question), record.data_source)
    return {
        task: _Question(*questions[task], Fraction(sum(rounds), len(rounds)))
        for task, rounds in outcomes.items()
    }


class Quantity(StrEnum):
    """A quantity to compare."""

    SCORE = "score"
    """Share of episodes that pass."""
    PROMPT = "prompt tokens"
    """Prompt tokens as billed: each request reads the whole conversation again."""
    SAMPLED = "sampled tokens"
    OBSERVED = "observed tokens"
    """Tokens that tools returned. For a team they are part of the prompts and not known separately."""
    TOKENS = "tokens"
    """Prompt and sampled tokens."""
    CALLS = "tool calls"
    SECONDS = "seconds"
    DOLLARS = "dollars"
    """Dollars for models and tools, without the judge."""


class Per(StrEnum):
    """The unit of a figure."""

    TASK = "task"
    SOLVED = "solved task"
    """Cost of all tasks divided by the number of solved ones, because failed ones are paid for too."""


_PER_SOLVED = (Quantity.TOKENS, Quantity.CALLS, Quantity.DOLLARS)
_METERED = (Quantity.PROMPT, Quantity.SAMPLED, Quantity.OBSERVED, Quantity.TOKENS, Quantity.DOLLARS)


class Saving(Settings):
    """1 - model / team, with its 95 % bootstrap interval over questions."""

    value: float
    low: float | None
    """``None`` if too few questions were solved, or cost the team anything, for a lower end."""
    high: float


class CostRow(Settings):
    """One quantity of team and model."""

    quantity: Quantity
    per: Per
    team: float | None
    model: float | None
    """``None`` if unknown: an endpoint did not report its usage, a run has no prices, or nothing was solved.
    """
    difference: Interval | None = None
    """Model minus team, paired by question, with its 95 % bootstrap interval. For the score it is that of `afm
    eval compare` (:func:`difference_interval`). ``None`` per solved task."""
    saving: Saving | None = None
    """``None`` for the score, if either figure is unknown, and if the team used nothing."""


class Savings(Settings):
    """Savings of a model against a team, on questions with a score in both. ``notes`` are reasons for missing figures."""

    team: str
    model: str
    questions: int
    rows: tuple[CostRow, ...]
    notes: tuple[str, ...] = ()

    def row(self, quantity: Quantity, per: Per = Per.TASK) -> CostRow:
        """Return the row of a quantity."""
        return next(row for row in self.rows if (row.quantity, row.per) == (quantity, per))


@dataclass(frozen=True, slots=True)
class Played:
    """One run, with its prices if it has any."""

    name: str
    records: Iterable[Record]
    prices: Prices | None
    by_team: bool


def savings(team: Played, model: Played, *, seed: int = 0) -> Savings:
    """Return what ``model`` saves against ``team``. A question counts with the mean of its scored episodes.

    Raises:
        DataError: No question has a score in both runs.
    """
    theirs, ours = _means(team), _means(model)
    common = sorted(theirs.keys() & ours.keys())
    if not common:
        raise DataError("the two runs have no scored question in common; expected runs on the same tasks")
    columns = _Columns([theirs[task] for task in common], [ours[task] for task in common], seed)
    return Savings(
        team=team.name,
        model=model.name,
        questions=len(common),
        rows=(*map(columns.per_task, Quantity), *map(columns.per_solved, _PER_SOLVED)),
        notes=tuple(note for run, means in ((team, theirs), (model, ours)) for note in _notes(run, means)),
    )


def _means(run: Played) -> dict[str, dict[Quantity, float]]:
    """Return the known means over the scored episodes of each question."""
    sums: defaultdict[str, Counter[Quantity]] = defaultdict(Counter)
    episodes: Counter[str] = Counter()
    unknown: set[Quantity] = {Quantity.OBSERVED} if run.by_team else set()
    for record in run.records:
        outcome = passed(record)
        if outcome is None:
            continue
        episodes[task_of(record)] += 1
        sums[task_of(record)].update(_figures(record, run.prices) | {Quantity.SCORE: outcome})
        unknown.update(_METERED if record.cost.unmetered else ())
    if run.prices is None:
        unknown.add(Quantity.DOLLARS)
    return {
        task: {name: total / episodes[task] for name, total in of_task.items() if name not in unknown}
        for task, of_task in sums.items()
    }


def _figures(record: Record, prices: Prices | None) -> dict[Quantity, float]:
    cost = record.cost
    read = cost.read_tokens or cost.prompt_tokens + cost.observation_tokens
    usd = prices.model_usd(cost) + prices.tools_usd(record.calls) if prices else 0.0
    return {
        Quantity.PROMPT: read,
        Quantity.SAMPLED: cost.agent_tokens,
        Quantity.OBSERVED: cost.observation_tokens,
        Quantity.TOKENS: read + cost.agent_tokens,
        Quantity.CALLS: cost.tool_calls,
        Quantity.SECONDS: cost.wall_seconds,
        Quantity.DOLLARS: usd,
    }


def _notes(run: Played, means: Mapping[str, Mapping[Quantity, float]]) -> Iterable[str]:
    known = next(iter(means.values()))
    if Quantity.TOKENS not in known:
        yield f"{run.name}: an endpoint did not report its usage, so tokens and dollars are not known."
    elif Quantity.DOLLARS not in known:
        yield f"{run.name} has no prices, so its dollars are not known."


@dataclass(frozen=True, slots=True)
class _Columns:
    """The questions of both runs in the same order."""

    team: Sequence[Mapping[Quantity, float]]
    model: Sequence[Mapping[Quantity, float]]
    seed: int

    def per_task(self, quantity: Quantity) -> CostRow:
        team, model = self._column(self.team, quantity), self._column(self.model, quantity)
        row = CostRow(quantity=quantity, per=Per.TASK, team=_mean(team), model=_mean(model))
        if team is None or model is None:
            return row
        changes = [after - before for before, after in zip(team, model, strict=True)]
        if quantity is Quantity.SCORE:
            return row.model_copy(update={"difference": difference_interval(changes, seed=self.seed)})
        difference = bootstrap_mean(changes, seed=self.seed)
        return row.model_copy(update={"difference": difference, "saving": self._saving((model,), (team,))})

    def per_solved(self, quantity: Quantity) -> CostRow:
        sides = [
            (self._column(side, quantity), self._column(side, Quantity.SCORE))
            for side in (self.team, self.model)
        ]
        values = [
            math.fsum(cost) / math.fsum(solved) if cost is not None and solved and any(solved) else None
            for cost, solved in sides
        ]
        row = CostRow(quantity=quantity, per=Per.SOLVED, team=values[0], model=values[1])
        (team, by_team), (model, by_model) = sides
        if None in values or team is None or model is None or by_team is None or by_model is None:
            return row
        return row.model_copy(update={"saving": self._saving((model, by_team), (by_model, team))})

    def _saving(self, tops: Sequence[Sequence[float]], bottoms: Sequence[Sequence[float]]) -> Saving | None:
        if not all(map(any, bottoms)):
            return None
        value, low, high = bootstrap_quotient(tops, bottoms, seed=self.seed)
        return Saving(value=1 - value, low=None if high is None else 1 - high, high=1 - low)

    def _column(self, side: Sequence[Mapping[Quantity, float]], quantity: Quantity) -> list[float] | None:
        return [row[quantity] for row in side] if quantity in side[0] else None


def _mean(column: Sequence[float] | None) -> float | None:
    return None if column is None else math.fsum(column) / len(column)
