"""Exact tests of paired differences: how often chance alone would give one as large."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from fractions import Fraction

from afm.errors import MissingExtraError

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
    try:
        import numpy as np
    except ImportError:
        raise MissingExtraError("numpy", "eval") from None
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
