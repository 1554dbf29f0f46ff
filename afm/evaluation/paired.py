"""The difference between two runs on the questions they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from afm.errors import DataError
from afm.evaluation.metrics import passed, task_of
from afm.evaluation.statistics import RESAMPLES, Interval, PairedTest, bootstrap_mean, holm, paired_p, wilson
from afm.trajectory.record import Record

DifferenceT = TypeVar("DifferenceT", bound="Difference")


class Difference(BaseModel):
    """How much better the second run is than the first, on the questions both have a score for.

    Attributes:
        difference: Mean over questions of (second - first) pass share.
        gained: Questions on which the second run is better.
        lost: Questions on which it is worse.
        p_value: Two-sided, of no difference (:func:`afm.evaluation.statistics.paired_p`).
        test: What gave it.
        p_holm: The same, corrected by Holm for all the comparisons it stands among; ``None`` where it stands alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    questions: int
    difference: Interval
    gained: int
    lost: int
    p_value: float
    test: PairedTest
    p_holm: float | None = None


class PairedDifference(Difference):
    """A difference, and that of every data source.

    Attributes:
        by_source: Where the questions are of several; corrected for their number.
    """

    by_source: dict[str, Difference] = Field(default_factory=dict)


def paired_difference(
    first: Iterable[Record], second: Iterable[Record], *, resamples: int = RESAMPLES, seed: int = 0
) -> PairedDifference:
    """How much better ``second`` is on the same questions, with an interval over questions and a p-value.

    Raises:
        DataError: No question has a score in both, or one id stands for two different questions.
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
    """The same with ``p_holm`` for their number."""
    corrected = holm([one.p_value for one in differences])
    return [one.model_copy(update={"p_holm": p}) for one, p in zip(differences, corrected, strict=True)]


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
    """Of the mean change of the pass share, by bootstrap over questions.

    Where all questions change alike, a bootstrap would claim certainty; then it is as wide as Wilson's for n of n.
    """
    if len(set(changes)) > 1:
        return bootstrap_mean(changes, resamples=resamples, seed=seed)
    width = 1 - wilson(len(changes), len(changes)).low
    value = changes[0]
    return Interval(value=value, low=max(-1.0, value - width), high=min(1.0, value + width))


class _Question(NamedTuple):
    """Hash of the question, its data source, and the share of its scored episodes that passed."""

    question: int
    source: str
    share: Fraction


def _shares(records: Iterable[Record]) -> dict[str, _Question]:
    """Questions by task."""
    outcomes: defaultdict[str, list[bool]] = defaultdict(list)
    told: dict[str, tuple[int, str]] = {}
    for record in records:
        outcome = passed(record)
        if outcome is not None:
            outcomes[task_of(record)].append(outcome)
            told[task_of(record)] = (hash(record.question), record.data_source)
    return {
        task: _Question(*told[task], Fraction(sum(rounds), len(rounds))) for task, rounds in outcomes.items()
    }
