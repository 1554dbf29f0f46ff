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
    """An estimate with the two ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __repr__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} .. {self.high:.3f})"


def wilson(successes: float, trials: int) -> Interval:
    """Share of successes with Wilson's score interval (Wilson 1927), which holds for small samples and ends.

    ``successes`` may be a sum of shares: nothing between 0 and 1 spreads more than successes of the same mean.
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
    """Mean of ``values`` with its 95 % percentile-bootstrap interval.

    Where all values are equal the interval has no width.

    Resampling n values with replacement is drawing how often each different value occurs from a multinomial
    distribution, so the work depends on how many different values there are, and not on n.
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
    """The product of the sums of ``tops`` over that of ``bottoms``, with the ends of its 95 % percentile-bootstrap interval.

    All columns have a value for each question, and a question is drawn with all of them. The upper end is ``None`` where a
    sum of ``bottoms`` is 0 in more than 2.5 % of the resamples. Where the quotient never changes the interval has no width.
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
    """Mean of shares with its bootstrap interval; where all are equal, Wilson's, as a bootstrap would claim certainty."""
    if len(set(shares)) == 1:
        return wilson(math.fsum(shares), len(shares))
    return bootstrap_mean(shares, seed=seed)


def pass_at_k(passes: int, rounds: int, k: int) -> float:
    """Unbiased chance that one of ``k`` episodes passes: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""
    return 1 - math.comb(rounds - passes, k) / math.comb(rounds, k)


def pass_hat_k(passes: int, rounds: int, k: int) -> float:
    """Unbiased chance that all of ``k`` episodes pass: C(c, k) / C(n, k) (tau-bench, arXiv 2406.12045)."""
    return math.comb(passes, k) / math.comb(rounds, k)


_MOST_STEPS = 200_000_000
_FLIPS = 100_000
_ROUNDING = 1e-12
"""Of a sum of floats: sums that are as far from 0 as the observed one count, also where they were added otherwise."""


class PairedTest(StrEnum):
    """Which test gave a p-value."""

    MCNEMAR = "exact McNemar test"
    PERMUTATION = "exact paired permutation test"
    SAMPLED = "paired permutation test, 100,000 random flips"


def paired_p(changes: Sequence[Fraction], *, seed: int = 0) -> tuple[float, PairedTest]:
    """Two-sided p-value of the mean of ``changes``, one per question, if each might as well have the other sign.

    The test of Fisher and Pitman: all 2^n choices of signs are as likely, and p is the share of those whose sum is at
    least as far from 0. They are counted by adding one question after another to the distribution of the sum. Where every
    change is -1, 0 or 1 this is the sign test, known as McNemar's exact test. Where the sums take too many values, it is
    the share among random signs, the observed ones among them (Phipson and Smyth 2010).
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
        sums = np.zeros(_FLIPS)  # as shares of the largest; changes of one size are drawn together
        for size, count in sorted(Counter(sizes).items()):
            sums += (2 * generator.binomial(count, 0.5, size=_FLIPS) - count) * (size / reach)
        at_least = 1 + int(np.count_nonzero(np.abs(sums) >= seen / reach - _ROUNDING))
        return at_least / (_FLIPS + 1), PairedTest.SAMPLED
    share = np.zeros(2 * reach + 1)
    share[reach] = 1.0
    for size in sizes:
        share = (
            np.roll(share, size) + np.roll(share, -size)
        ) / 2  # never reaches the ends, so nothing goes round
    tail = math.fsum(share[reach + seen :].tolist())
    p = 2 * tail if seen else 1.0
    return min(1.0, p), PairedTest.MCNEMAR if unit == 1 else PairedTest.PERMUTATION


def _binomial_p(count: int, seen: int) -> float:
    """Chance that ``count`` signs add up to ``seen`` or more, or to its negative or less."""
    most = math.lgamma(count + 1) - count * math.log(2)
    tail = math.fsum(
        math.exp(most - math.lgamma(plus + 1) - math.lgamma(count - plus + 1))
        for plus in range((count + seen) // 2, count + 1)
    )
    return min(1.0, 2 * tail) if seen else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """The same p-values corrected for their number (Holm 1979): below 0.05 for all that hold together at 5 %."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


Table = tuple[int, int, int, int]
"""Verdicts of two raters: both correct, only the first, only the second, neither."""


class Agreement(Settings):
    """How far two raters agree."""

    first: str
    second: str
    """Who they are; ``recorded`` are the verdicts of the run itself."""
    episodes: int
    """With a verdict of both. ``abstained`` lack one of them, ``settled`` need no judge; they do not count.
    """
    questions: int
    agreed: Interval | None
    """Mean over questions of the share of equal verdicts."""
    kappa: float | None
    """Cohen's kappa over all episodes; ``None`` where it is not defined, as one verdict is all there is."""
    kappa_interval: Interval | None = None
    """Its 95 % bootstrap interval over questions; ``None`` where a bootstrap would claim certainty."""
    both: int = 0
    only_first: int = 0
    only_second: int = 0
    neither: int = 0
    """Episodes by who found them correct."""
    abstained: int = 0
    settled: int = 0


def cohens_kappa(table: Table) -> float | None:
    """(p_o - p_e) / (1 - p_e) (Cohen 1960); ``None`` where chance alone would give full agreement."""
    if not sum(table):
        return None
    observed, expected = _observed_and_expected(*table)
    return None if expected == 1 else (observed - expected) / (1 - expected)


def _observed_and_expected(both: Any, first: Any, second: Any, neither: Any) -> tuple[Any, Any]:
    """Shares of equal verdicts, as counted and by chance; of numbers, or of arrays of them."""
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
    """The agreement of two raters.

    Args:
        verdicts: Pairs of verdicts by question: the rounds of one question are not independent, so intervals are over
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
    """Counts of pairs of verdicts."""
    counts = Counter(pairs)
    return counts[True, True], counts[True, False], counts[False, True], counts[False, False]


def _interval(kappa: float, tables: Sequence[Table], seed: int) -> Interval | None:
    """Percentile bootstrap over questions; resamples for which kappa is not defined are left out."""
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
