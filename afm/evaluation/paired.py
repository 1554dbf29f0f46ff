"""The difference between two runs on the questions they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from afm.errors import DataError
from afm.evaluation.intervals import RESAMPLES, Interval, bootstrap_mean, wilson
from afm.evaluation.metrics import passed, task_of
from afm.trajectory.record import Record


class PairedDifference(BaseModel):
    """How much better the second run is than the first, on the questions both have a score for.

    Attributes:
        difference: Mean over questions of (second - first) pass share.
        gained: Questions on which the second run is better.
        lost: Questions on which it is worse.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    questions: int
    difference: Interval
    gained: int
    lost: int


def paired_difference(
    first: Iterable[Record], second: Iterable[Record], *, resamples: int = RESAMPLES, seed: int = 0
) -> PairedDifference:
    """How much better ``second`` is on the same questions, with an interval over questions.

    Raises:
        DataError: No question has a score in both, or one id stands for two different questions.
    """
    before, after = _shares(first), _shares(second)
    common = sorted(before.keys() & after.keys())
    if not common:
        raise DataError("the two runs have no scored question in common; expected runs on the same tasks")
    for task in common:
        if before[task][0] != after[task][0]:
            raise DataError(f"task {task!r} is another question in the second run; expected the same tasks")
    changes = [after[task][1] - before[task][1] for task in common]
    return PairedDifference(
        questions=len(common),
        difference=_interval(changes, resamples, seed),
        gained=sum(change > 0 for change in changes),
        lost=sum(change < 0 for change in changes),
    )


def _interval(changes: Sequence[float], resamples: int, seed: int) -> Interval:
    """The bootstrap's; where all questions change alike it would claim certainty, so as wide as Wilson's for n of n."""
    if len(set(changes)) > 1:
        return bootstrap_mean(changes, resamples=resamples, seed=seed)
    width = 1 - wilson(len(changes), len(changes)).low
    value = changes[0]
    return Interval(value=value, low=max(-1.0, value - width), high=min(1.0, value + width))


def _shares(records: Iterable[Record]) -> dict[str, tuple[int, float]]:
    """Hash of the question and pass share by task."""
    outcomes: defaultdict[str, list[bool]] = defaultdict(list)
    questions: dict[str, int] = {}
    for record in records:
        outcome = passed(record)
        if outcome is not None:
            outcomes[task_of(record)].append(outcome)
            questions[task_of(record)] = hash(record.question)
    return {task: (questions[task], sum(rounds) / len(rounds)) for task, rounds in outcomes.items()}
