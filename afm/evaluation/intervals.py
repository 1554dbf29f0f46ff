"""The statistics behind the figures: intervals and pass@k, each with its source."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from afm.errors import MissingExtraError

RESAMPLES = 10_000
_Z95 = 1.959963984540054
_MAX_CELLS = 1 << 22


class Interval(BaseModel):
    """An estimate with the two ends of its 95 % interval."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float
    low: float
    high: float


def wilson(successes: float, trials: int) -> Interval:
    """Share of successes with Wilson's score interval (Wilson 1927), which holds for small samples and ends.

    ``successes`` may be a sum of shares: nothing between 0 and 1 spreads more than successes of the same mean.
    """
    share = successes / trials
    spread = _Z95**2 / trials
    centre = (share + spread / 2) / (1 + spread)
    half = _Z95 * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return Interval(value=share, low=max(0.0, centre - half), high=min(1.0, centre + half))


def bootstrap_mean(values: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Mean of ``values`` with its 95 % percentile-bootstrap interval.

    Where all values are equal the interval has no width.

    Resampling n values with replacement is drawing how often each different value occurs from a multinomial
    distribution, so the work depends on how many different values there are, and not on n.
    """
    try:
        import numpy as np
    except ImportError:
        raise MissingExtraError("numpy", "eval") from None
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


def bootstrap_ratio(
    tops: Sequence[float], bottoms: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float | None]:
    """Sum of ``tops`` over sum of ``bottoms``, with the ends of its 95 % percentile-bootstrap interval over pairs.

    The upper end is ``None`` where ``bottoms`` add up to 0 in more than 2.5 % of the resamples. Where all pairs have one
    ratio the interval has no width.
    """
    return bootstrap_quotient([tops], [bottoms], resamples=resamples, seed=seed)


def bootstrap_quotient(
    tops: Sequence[Sequence[float]],
    bottoms: Sequence[Sequence[float]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float, float | None]:
    """The product of the sums of ``tops`` over that of ``bottoms``, with its interval as :func:`bootstrap_ratio` has it.

    All columns have a value for each question, and a question is drawn with all of them.
    """
    try:
        import numpy as np
    except ImportError:
        raise MissingExtraError("numpy", "eval") from None
    columns = np.column_stack([np.asarray(column, dtype=float) for column in (*tops, *bottoms)])
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
