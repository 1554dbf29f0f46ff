import math

import pytest

from afm.evaluation.statistics import bootstrap_mean, mean_of_shares, pass_at_k, pass_hat_k, wilson


def test_wilson_of_8_of_10() -> None:
    # z = 1.96: centre (0.8 + 0.19207) / 1.38415 = 0.71674, half-width 0.22658 (Agresti and Coull 1998, table)
    found = wilson(8, 10)
    assert (found.value, round(found.low, 4), round(found.high, 4)) == (0.8, 0.4902, 0.9433)


def test_wilson_at_the_ends_is_neither_empty_nor_outside() -> None:
    # For 0 of n the upper end is z^2 / (n + z^2): 3.8415 / 33.8415.
    nothing, everything = wilson(0, 30), wilson(30, 30)
    assert nothing.low == 0
    assert math.isclose(nothing.high, 3.841459 / 33.841459, rel_tol=1e-6)
    assert math.isclose(everything.low, 1 - nothing.high, rel_tol=1e-9)
    assert math.isclose(everything.high, 1)


def test_the_bootstrap_of_a_fair_coin_is_the_binomial() -> None:
    # Means of 100 resampled coin tosses are Binomial(100, 1/2) / 100: its 2.5 % and 97.5 % points are 40 and 60.
    interval = bootstrap_mean([0.0] * 50 + [1.0] * 50)
    assert (interval.value, interval.low, interval.high) == (0.5, 0.4, 0.6)


def test_the_bootstrap_does_not_depend_on_the_order_and_repeats_with_its_seed() -> None:
    values = [0.1, 0.9, 0.4, 0.4, 0.25, 0.75, 0.3]
    assert bootstrap_mean(values, seed=3) == bootstrap_mean(values[::-1], seed=3)
    assert bootstrap_mean(values, seed=3) != bootstrap_mean(values, seed=4)


def test_equal_shares_are_no_certainty() -> None:
    # Eight questions of one half each are taken like four of eight: z^2/n = 0.480182, centre 0.5,
    # half-width sqrt(0.25 * 0.480182 + (0.480182 / 2)^2) / 1.480182 = 0.2848.
    interval = mean_of_shares([0.5] * 8)
    half = math.sqrt(0.25 * 0.4801823 + 0.2400912**2) / 1.4801823
    assert interval.value == 0.5
    assert (interval.low, interval.high) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
    assert half == pytest.approx(0.2848, abs=1e-4)


@pytest.mark.parametrize(
    ("estimate", "passes", "rounds", "k", "expected"),
    [
        (pass_at_k, 1, 3, 1, 1 / 3),
        (pass_at_k, 1, 3, 2, 2 / 3),  # 1 - C(2,2)/C(3,2) = 1 - 1/3
        (pass_at_k, 2, 4, 2, 5 / 6),  # 1 - C(2,2)/C(4,2) = 1 - 1/6
        (pass_at_k, 0, 5, 5, 0.0),
        (pass_at_k, 1, 5, 5, 1.0),
        (pass_at_k, 3, 4, 2, 1.0),  # two failures cannot be drawn
        (pass_hat_k, 2, 3, 2, 1 / 3),
        (pass_hat_k, 3, 3, 3, 1),
        (pass_hat_k, 1, 4, 2, 0),
        (pass_hat_k, 4, 5, 1, 0.8),
    ],
)
def test_passes_of_k_rounds(estimate, passes, rounds, k, expected) -> None:
    assert math.isclose(estimate(passes, rounds, k), expected)
