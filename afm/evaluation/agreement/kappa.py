"""Raw agreement and Cohen's kappa of two raters, with bootstrap intervals over questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from afm.errors import MissingExtraError
from afm.evaluation.intervals import RESAMPLES, Interval, mean_of_shares

Table = tuple[int, int, int, int]
"""Verdicts of two raters: both correct, only the first, only the second, neither."""


class Agreement(BaseModel):
    """How far two raters agree.

    Attributes:
        first, second: Who they are; ``recorded`` are the verdicts of the run itself.
        episodes: With a verdict of both.
        questions: They belong to.
        agreed: Mean over questions of the share of equal verdicts.
        kappa: Cohen's kappa over all episodes; ``None`` where it is not defined, as one verdict is all there is.
        kappa_interval: Its 95 % bootstrap interval over questions; ``None`` where a bootstrap would claim certainty.
        both, only_first, only_second, neither: Episodes by who found them correct.
        abstained: Episodes without a verdict of one of them; they do not count.
        settled: Episodes that need no judge (no answer, or a gold answer word for word); they do not count.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    first: str
    second: str
    episodes: int
    questions: int
    agreed: Interval | None
    kappa: float | None
    kappa_interval: Interval | None = None
    both: int = 0
    only_first: int = 0
    only_second: int = 0
    neither: int = 0
    abstained: int = 0
    settled: int = 0


def cohens_kappa(table: Table) -> float | None:
    """(p_o - p_e) / (1 - p_e) (Cohen 1960); ``None`` where chance alone would give full agreement."""
    both, first, second, neither = table
    count = sum(table)
    if not count:
        return None
    observed = (both + neither) / count
    expected = ((both + first) * (both + second) + (second + neither) * (first + neither)) / count**2
    return None if expected == 1 else (observed - expected) / (1 - expected)


def agreement(
    first: str,
    second: str,
    verdicts: Mapping[str, Sequence[tuple[bool, bool]]],
    *,
    abstained: int = 0,
    settled: int = 0,
    seed: int = 0,
) -> Agreement:
    """The agreement of two raters.

    Args:
        verdicts: Pairs of verdicts by question: the rounds of one question are not independent, so intervals are over
            questions.
    """
    tables = [table_of(pairs) for pairs in verdicts.values() if pairs]
    total: Table = (
        sum(table[0] for table in tables),
        sum(table[1] for table in tables),
        sum(table[2] for table in tables),
        sum(table[3] for table in tables),
    )
    kappa = cohens_kappa(total)
    shares = [(table[0] + table[3]) / sum(table) for table in tables]
    return Agreement(
        first=first,
        second=second,
        episodes=sum(total),
        questions=len(tables),
        agreed=mean_of_shares(shares, seed=seed) if shares else None,
        kappa=kappa,
        kappa_interval=None if kappa is None else _interval(kappa, tables, seed),
        both=total[0],
        only_first=total[1],
        only_second=total[2],
        neither=total[3],
        abstained=abstained,
        settled=settled,
    )


def table_of(pairs: Iterable[tuple[bool, bool]]) -> Table:
    """Counts of pairs of verdicts."""
    counts = Counter(pairs)
    return counts[True, True], counts[True, False], counts[False, True], counts[False, False]


def _interval(kappa: float, tables: Sequence[Table], seed: int) -> Interval | None:
    """Percentile bootstrap over questions; resamples for which kappa is not defined are left out."""
    if len(tables) < 2 or kappa == 1:
        return None
    try:
        import numpy as np
    except ImportError:
        raise MissingExtraError("numpy", "eval") from None
    kinds = Counter(tables)
    rows = np.asarray(list(kinds), dtype=float)
    chances = np.asarray(list(kinds.values())) / len(tables)
    drawn = np.random.default_rng(seed).multinomial(len(tables), chances, size=RESAMPLES)
    both, first, second, neither = (drawn @ rows).T
    count = both + first + second + neither
    observed = (both + neither) / count
    expected = ((both + first) * (both + second) + (second + neither) * (first + neither)) / count**2
    defined = expected < 1
    if defined.sum() < RESAMPLES // 2:
        return None
    kappas = (observed[defined] - expected[defined]) / (1 - expected[defined])
    low, high = np.quantile(kappas, [0.025, 0.975])
    return Interval(value=kappa, low=float(low), high=float(high))
