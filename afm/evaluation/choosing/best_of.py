"""What choosing among k episodes of a question is worth, as figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from afm.evaluation.intervals import Interval


class Method(StrEnum):
    """How the judge chooses."""

    LIST = "list"
    """It sees k episodes beside each other and names one."""
    SCORE = "score"
    """It grades each episode alone; the best grade wins."""


class BestOf(BaseModel):
    """best-of-k of one run by one judge.

    Attributes:
        judge: The model.
        share: Share of questions whose chosen episode passes, with a bootstrap interval over questions.
        questions: Those that count: with k scored episodes, and a choice.
        abstained: Choices (``list``) or grades (``score``) that the judge failed to give; their questions do not count.
        asked: Choices or grades that the judge gave.
        settled: Those that needed no judge: no answers, one answer, or all the same one.
        places: How often the judge chose each place in the list, as shares; without a bias all are 1 / k.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Method
    k: int
    judge: str
    share: Interval | None
    questions: int
    abstained: int = 0
    asked: int = 0
    settled: int = 0
    places: dict[int, float] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people: ``best-of-3 (list)``."""
        return f"best-of-{self.k} ({self.method})"


def best_of_k(graded: Sequence[tuple[float, bool]], k: int) -> float:
    """Chance that the best graded of k episodes passes, over all choices of k among them.

    Args:
        graded: Grade and outcome of each of n >= k episodes.

    The episode at place i of n, best grade first, is the best of C(n-1-i, k-1) of the C(n, k) subsets. Equal grades are
    decided by lot, so each of them counts as the mean outcome of all of them.
    """
    outcomes: dict[float, list[bool]] = {}
    for grade, passed in graded:
        outcomes.setdefault(grade, []).append(passed)
    ranked = [
        sum(outcomes[grade]) / len(outcomes[grade])
        for grade in sorted(outcomes, reverse=True)
        for _ in outcomes[grade]
    ]
    count = len(ranked)
    ways = (math.comb(count - 1 - place, k - 1) * share for place, share in enumerate(ranked))
    return math.fsum(ways) / math.comb(count, k)
