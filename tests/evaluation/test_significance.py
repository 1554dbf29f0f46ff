import itertools
import math
from fractions import Fraction

import pytest

from afm.evaluation import paired_difference
from afm.evaluation.paired import holm_corrected
from afm.evaluation.statistics import PairedTest, holm, paired_p
from afm.evaluation.wording import p_words, source_words


def changes_of(better, worse=0, same=0):
    return [Fraction(1)] * better + [Fraction(-1)] * worse + [Fraction(0)] * same


@pytest.mark.parametrize(
    ("changes", "p"),
    [
        # 8 better, 1 worse: 2 * (C(9,0) + C(9,1)) / 2^9 = 20 / 512.
        (changes_of(8, 1, 30), 20 / 512),
        (changes_of(1, 8, 30), 20 / 512),
        (changes_of(1, 1), 1.0),
        (changes_of(0, 0, 5), 1.0),
        # The binomial's tail of 3,610 questions.
        (changes_of(330, 270, 3010), 2 * sum(math.comb(600, k) for k in range(271)) / 2**600),
        # Too many to count one by one: the normal approximation of the tail, corrected for continuity.
        (changes_of(20_200, 20_000), pytest.approx(math.erfc(199 / math.sqrt(2 * 40_200)), rel=1e-4)),
    ],
)
def test_mcnemar_by_hand(changes, p) -> None:
    expected = pytest.approx(p, rel=1e-9) if isinstance(p, float) else p
    assert paired_p(changes) == (expected, PairedTest.MCNEMAR)


def test_the_permutation_test_counts_every_choice_of_signs() -> None:
    # Sizes 1/2, 1/2 and 1: of the 8 sums only +2 and -2 are as far from 0 as 2.
    assert paired_p([Fraction(1, 2), Fraction(1, 2), Fraction(1)]) == (0.25, PairedTest.PERMUTATION)
    changes = [Fraction(n, 12) for n in (3, -4, 8, 6, 12, -1, 9, 2)]
    signs = itertools.product((-1, 1), repeat=8)
    sums = [abs(sum(s * c for s, c in zip(choice, changes, strict=True))) for choice in signs]
    assert paired_p(changes)[0] == pytest.approx(sum(one >= abs(sum(changes)) for one in sums) / 256)


def test_too_many_sums_are_sampled() -> None:
    changes = [Fraction(n % 7 - 2, n % 16 + 1) for n in range(300)]
    p, test = paired_p(changes)
    assert test is PairedTest.SAMPLED
    # By the normal approximation of the sum of signs.
    z = abs(float(sum(changes))) / math.sqrt(float(sum(c * c for c in changes)))
    assert p == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.02)


def test_sums_as_far_away_as_the_observed_one_count_in_a_sample_too() -> None:
    # So many denominators that no float holds a sum exactly. All changes go one way: only 2 of 2^n sums are as far.
    for primes in ((97, 89, 83, 79), (97, 89, 83, 79, 73, 71, 67)):
        changes = [Fraction(number + 40, prime) for number, prime in enumerate(primes)]
        p, test = paired_p(changes)
        assert (p, test) == (pytest.approx(2 / 2 ** len(primes), rel=0.1), PairedTest.SAMPLED)


def test_holm_by_hand() -> None:
    # Sorted: 0.01 * 4, 0.02 * 3, 0.03 * 2 (not below the one before), 0.5.
    assert holm([0.03, 0.5, 0.01, 0.02]) == pytest.approx([0.06, 0.5, 0.04, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_runs_are_tested_whole_and_by_source(record) -> None:
    def runs(scores):
        return [
            record(f"{source}{i}", float(i in scores), source=source) for source in "ab" for i in range(9)
        ]

    both = paired_difference(runs(()), runs(range(9)))
    assert (both.p_value, both.test) == (pytest.approx(2 / 2**18), PairedTest.MCNEMAR)
    assert {name: one.p_value for name, one in both.by_source.items()} == {"a": 2 / 512, "b": 2 / 512}
    assert {name: one.p_holm for name, one in both.by_source.items()} == {"a": 4 / 512, "b": 4 / 512}
    assert p_words(both) == "p < 0.0001 (exact McNemar test)"
    assert source_words(both.by_source["a"]).endswith("9 questions, p = 0.0078)")
    first, second = holm_corrected([both, paired_difference(runs(()), runs((1,)))])
    assert (first.p_holm, second.p_holm) == (pytest.approx(4 / 2**18), pytest.approx(0.5))
    assert p_words(second).endswith("corrected for several comparisons (Holm) p = 0.5")


def test_rounds_make_it_a_permutation_test(record) -> None:
    def run(share):
        return [record(f"t{i}", float(r < share), number=r) for i in range(6) for r in range(4)]

    found = paired_difference(run(1), run(3))
    assert (found.p_value, found.test) == (pytest.approx(2 / 64), PairedTest.PERMUTATION)
    assert found.by_source == {}
