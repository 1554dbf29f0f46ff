import pytest

from afm.evaluation.statistics import agreement, cohens_kappa


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        # Agree on 35 of 50; by chance .5 * .6 + .5 * .4 = .5; (.7 - .5) / .5.
        ((20, 5, 10, 15), 0.4),
        # The same raw agreement of 90 %, rare and common verdicts: (.9 - .82) / .18 and (.9 - .5) / .5.
        ((85, 5, 5, 5), (0.9 - 0.82) / 0.18),
        ((45, 5, 5, 45), 0.8),
        ((10, 0, 0, 10), 1.0),
        ((0, 10, 10, 0), -1.0),
        ((5, 5, 5, 5), 0.0),
        ((10, 0, 0, 0), None),
        ((0, 0, 0, 0), None),
    ],
)
def test_kappa(table, expected) -> None:
    assert cohens_kappa(table) == (None if expected is None else pytest.approx(expected))


def test_intervals_are_over_questions() -> None:
    once = {f"{cell}{i}": [cell] for cell, count in CELLS.items() for i in range(count)}
    single = agreement("a", "b", once)
    assert (single.episodes, single.questions, single.agreed.value) == (50, 50, pytest.approx(0.7))
    assert (single.both, single.only_first, single.only_second, single.neither) == (20, 5, 10, 15)
    assert single.kappa == single.kappa_interval.value == pytest.approx(0.4)
    # A normal approximation gives .4 +- 1.96 * sqrt(.7 * .3 / 50) / .5 = .15 to .65.
    assert single.kappa_interval.low == pytest.approx(0.15, abs=0.04)
    assert single.kappa_interval.high == pytest.approx(0.65, abs=0.04)
    four_rounds = agreement("a", "b", {question: pairs * 4 for question, pairs in once.items()})
    assert four_rounds.kappa == pytest.approx(0.4)
    assert four_rounds.kappa_interval == single.kappa_interval  # four equal rounds tell no more than one


CELLS = {(True, True): 20, (True, False): 5, (False, True): 10, (False, False): 15}


def test_where_all_agree_no_certainty_is_claimed() -> None:
    found = agreement("a", "b", {"q": [(True, True)], "r": [(False, False)], "s": []}, abstained=3, settled=4)
    assert (found.kappa, found.kappa_interval, found.questions) == (1.0, None, 2)
    assert (found.agreed.value, found.agreed.high) == (1.0, 1.0)
    assert found.agreed.low == pytest.approx(0.342, abs=0.001)  # Wilson, 2 of 2
    assert (found.abstained, found.settled) == (3, 4)
    assert agreement("a", "b", {"q": [(True, True)]}).kappa is None
    assert agreement("a", "b", {}).agreed is None
