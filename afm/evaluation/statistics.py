"""Statistics of shares and means: intervals, pass@k, paired tests with Holm's correction, Cohen's kappa."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from fractions import Fraction
from typing import Any

from afm.configuration import Settings
from afm.errors import MissingExtraError

RESAMPLES = 10_000
_Z95 = 1.959963984540054
_MAX_CELLS = 1 << 22


class Interval(Settings):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def __repr__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def wilson(successes: float, trials: int) -> Interval:
    """Return the share of successes with Wilson's score interval (Wilson 1927). It holds for small samples and near 0 and 1.

    ``successes`` may be a sum of shares: no values between 0 and 1 spread more than successes with the same mean.
    """
    share = successes / trials
    spread = _Z95**2 / trials
    centre = (share + spread / 2) / (1 + spread)
    half = _Z95 * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return Interval(value=share, low=max(0.0, centre - half), high=min(1.0, centre + half))


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise MissingExtraError("numpy", "eval") from None
    return numpy


def bootstrap_mean(values: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the mean of ``values`` with its 95 % percentile-bootstrap interval.

    The interval has no width if all values are equal.

    To resample n values with replacement is to draw the count of each distinct value from a multinomial distribution.
    So the work depends on the number of distinct values, not on n.
    """
    np = _numpy()
    different, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    generator = np.random.default_rng(seed)
    total = len(values)
    rows = max(1, _MAX_CELLS // len(different))
    means = [
        generator.multinomial(total, counts / total, size=min(rows, resamples - done)) @ different / total
        for done in range(0, resamples, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Interval(value=math.fsum(values) / total, low=float(low), high=float(high))


def bootstrap_quotient(
    tops: Sequence[Sequence[float]],
    bottoms: Sequence[Sequence[float]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float, float | None]:
    """Return a quotient with the ends of its 95 % percentile-bootstrap interval.

    It is the product of the sums of ``tops`` over the product of the sums of ``bottoms``. Every column has a value for each
    question. A question is drawn with all its values. The upper end is ``None`` if a sum of ``bottoms`` is 0 in more than
    2.5 % of the resamples. The interval has no width if the quotient never changes.
    """
    np = _numpy()
    columns = np.column_stack([*tops, *bottoms]).astype(float)
    generator = np.random.default_rng(seed)
    total = len(columns)
    rows = max(1, _MAX_CELLS // total)
    sums = np.concatenate(
        [
            generator.multinomial(total, np.full(total, 1 / total), size=min(rows, resamples - done))
            @ columns
            for done in range(0, resamples, rows)
        ]
    )
    ratios = np.full(resamples, np.inf)
    above, below = sums[:, : len(tops)].prod(axis=1), sums[:, len(tops) :].prod(axis=1)
    np.divide(above, below, out=ratios, where=below > 0)
    low = float(np.quantile(ratios, 0.025, method="lower"))
    high = float(np.quantile(ratios, 0.975, method="higher"))
    value = math.prod(map(math.fsum, tops)) / math.prod(map(math.fsum, bottoms))
    return value, min(low, value), None if math.isinf(high) else max(high, value)


def mean_of_shares(shares: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the mean of shares with a bootstrap interval, or Wilson's if all are equal: a bootstrap would have no width."""
    if len(set(shares)) == 1:
        return wilson(math.fsum(shares), len(shares))
    return bootstrap_mean(shares, seed=seed)


def pass_at_k(passes: int, rounds: int, k: int) -> float:
    """Return the unbiased chance that one of ``k`` episodes passes: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""
    return 1 - math.comb(rounds - passes, k) / math.comb(rounds, k)


def pass_hat_k(passes: int, rounds: int, k: int) -> float:
    """Return the unbiased chance that all of ``k`` episodes pass: C(c, k) / C(n, k) (tau-bench, arXiv 2406.12045)."""
    return math.comb(passes, k) / math.comb(rounds, k)


_MOST_STEPS = 200_000_000
_FLIPS = 100_000
_ROUNDING = 1e-12
"""Rounding error of a sum of floats. Sums as far from 0 as the observed one count, whatever the order of addition."""


class PairedTest(StrEnum):
    """The test behind a p-value."""

    MCNEMAR = "exact McNemar test"
    PERMUTATION = "exact paired permutation test"
    SAMPLED = "paired permutation test, 100,000 random flips"


def paired_p(changes: Sequence[Fraction], *, seed: int = 0) -> tuple[float, PairedTest]:
    """Return the two-sided p-value of the mean of ``changes``, one per question, if both signs are equally likely.

    This is the test of Fisher and Pitman. All 2^n choices of signs are equally likely, and p is the share of those whose
    sum is at least as far from 0. They are counted by adding one question after another to the distribution of the sum.
    If every change is -1, 0 or 1, this is the sign test, known as McNemar's exact test. If the sums take too many values,
    p is the share among random signs, with the observed signs included (Phipson and Smyth 2010).
    """
    np = _numpy()
    unit = math.lcm(*(change.denominator for change in changes)) if changes else 1
    moved = [int(change * unit) for change in changes if change]
    if not moved:
        return 1.0, PairedTest.MCNEMAR if unit == 1 else PairedTest.PERMUTATION
    sizes, seen = [abs(change) for change in moved], abs(sum(moved))
    reach = sum(sizes)
    if len(sizes) * (2 * reach + 1) > _MOST_STEPS:
        if unit == max(sizes) == 1:
            return _binomial_p(len(sizes), seen), PairedTest.MCNEMAR
        generator = np.random.default_rng(seed)
        sums = np.zeros(_FLIPS)  # shares of the largest sum; changes of one size are drawn together
        for size, count in sorted(Counter(sizes).items()):
            sums += (2 * generator.binomial(count, 0.5, size=_FLIPS) - count) * (size / reach)
        at_least = 1 + int(np.count_nonzero(np.abs(sums) >= seen / reach - _ROUNDING))
        return at_least / (_FLIPS + 1), PairedTest.SAMPLED
    share = np.zeros(2 * reach + 1)
    share[reach] = 1.0
    for size in sizes:
        share = (
            np.roll(share, size) + np.roll(share, -size)
        ) / 2  # the sum never reaches the ends, so nothing wraps around
    tail = math.fsum(share[reach + seen :].tolist())
    p = 2 * tail if seen else 1.0
    return min(1.0, p), PairedTest.MCNEMAR if unit == 1 else PairedTest.PERMUTATION


def _binomial_p(count: int, seen: int) -> float:
    """Return the chance that ``count`` random signs add up to at least ``seen`` or at most its negative."""
    most = math.lgamma(count + 1) - count * math.log(2)
    tail = math.fsum(
        math.exp(most - math.lgamma(plus + 1) - math.lgamma(count - plus + 1))
        for plus in range((count + seen) // 2, count + 1)
    )
    return min(1.0, 2 * tail) if seen else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm 1979). Those below 0.05 hold together at the 5 % level."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


Table = tuple[int, int, int, int]
"""Verdicts of two raters: both correct, only the first, only the second, neither."""


class Agreement(Settings):
    """The agreement of two raters."""

    first: str
    second: str
    """Names of the raters. ``recorded`` are the verdicts of the run itself."""
    episodes: int
    """Number of episodes with verdicts of both. ``abstained`` lack one, ``settled`` need no judge. These do not
    count."""
    questions: int
    agreed: Interval | None
    """Mean over questions of the share of equal verdicts."""
    kappa: float | None
    """Cohen's kappa over all episodes. ``None`` where it is not defined, because all verdicts are equal."""
    kappa_interval: Interval | None = None
    """Its 95 % bootstrap interval over questions. ``None`` where a bootstrap would have no width."""
    both: int = 0
    only_first: int = 0
    only_second: int = 0
    neither: int = 0
    """Number of episodes by the raters that found them correct."""
    abstained: int = 0
    settled: int = 0


def cohens_kappa(table: Table) -> float | None:
    """Return (p_o - p_e) / (1 - p_e) (Cohen 1960), ``None`` where chance would give full agreement."""
    if not sum(table):
        return None
    observed, expected = _observed_and_expected(*table)
    return None if expected == 1 else (observed - expected) / (1 - expected)


def _observed_and_expected(both: Any, first: Any, second: Any, neither: Any) -> tuple[Any, Any]:
    """Return the shares of equal verdicts, observed and by chance. Takes numbers or arrays."""
    count = both + first + second + neither
    by_chance = (both + first) * (both + second) + (second + neither) * (first + neither)
    return (both + neither) / count, by_chance / count**2


def agreement(
    first: str,
    second: str,
    verdicts: Mapping[str, Sequence[tuple[bool, bool]]],
    *,
    abstained: int = 0,
    settled: int = 0,
    seed: int = 0,
) -> Agreement:
    """Compute the agreement of two raters.

    Args:
        verdicts: Pairs of verdicts by question. Rounds of a question are not independent, so intervals are over
            questions.
    """
    tables = [table_of(pairs) for pairs in verdicts.values() if pairs]
    total = table_of(pair for pairs in verdicts.values() for pair in pairs)
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
    """Count pairs of verdicts."""
    counts = Counter(pairs)
    return counts[True, True], counts[True, False], counts[False, True], counts[False, False]


def _interval(kappa: float, tables: Sequence[Table], seed: int) -> Interval | None:
    """Return the percentile bootstrap over questions, without resamples where kappa is not defined."""
    if len(tables) < 2 or kappa == 1:
        return None
    np = _numpy()
    kinds = Counter(tables)
    rows = np.asarray(list(kinds), dtype=float)
    chances = np.asarray(list(kinds.values())) / len(tables)
    drawn = np.random.default_rng(seed).multinomial(len(tables), chances, size=RESAMPLES)
    observed, expected = _observed_and_expected(*(drawn @ rows).T)
    defined = expected < 1
    if defined.sum() < RESAMPLES // 2:
        return None
    kappas = (observed[defined] - expected[defined]) / (1 - expected[defined])
    low, high = np.quantile(kappas, [0.025, 0.975])
    return Interval(value=kappa, low=float(low), high=float(high))
