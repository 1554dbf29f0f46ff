"""F1 of plans against values worked out by hand, and the matching against trying everything."""

import itertools
import random

import pytest

from afm.rewards.t_eval_plans import Words, best_matching, longest_rise, plan_f1

SEARCH, DETAILS, PRICE = (
    ("Home.search", "{'place': 'Berlin'}"),
    ("Home.details", "{'id': 7}"),
    ("Home.price", "{'id': 7}"),
)
FINISH = ("FinishAction", "{}")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([SEARCH, DETAILS, PRICE, FINISH], 1.0),
        ([SEARCH, DETAILS, PRICE], 1.0),
        ([SEARCH, PRICE], 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        # Found are two of three in the expected order: recall and precision 2/3.
        ([SEARCH, PRICE, DETAILS], 2 / 3),
        # Other arguments: 0.75 for the name alone is not above 0.8.
        ([("Home.search", "somewhere"), DETAILS, PRICE], 2 / 3),
        # Nothing alike counts as one step, as in the owner's program.
        ([("Other.tool", "{}")], 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ([], 0.0),
    ],
)
def test_plan_f1(given, expected) -> None:
    assert plan_f1(given, [SEARCH, DETAILS, PRICE, FINISH], Words()) == pytest.approx(expected)


def test_the_longest_rise() -> None:
    assert [longest_rise(places) for places in ([], [4], [3, 2, 1], [2, 0, 1, 5, 3])] == [0, 1, 1, 3]


def test_the_matching_has_the_largest_sum() -> None:
    # Greedy takes 0.9 and is left with 0: 0.9; the best is 0.85 + 0.86.
    assert best_matching([[0.9, 0.85], [0.86, 0.0]]) == [1, 0]
    assert best_matching([[0.0, 0.0]]) == [None]
    lots = random.Random(0)
    for _ in range(200):
        rows, columns = lots.randint(1, 5), lots.randint(1, 5)
        weights = [[lots.choice([0.0, lots.random()]) for _ in range(columns)] for _ in range(rows)]
        found = best_matching(weights)
        taken = [column for column in found if column is not None]
        assert len(taken) == len(set(taken))
        total = sum(weights[row][column] for row, column in enumerate(found) if column is not None)
        size = max(rows, columns)
        best = max(
            sum(weights[row][column] for row, column in enumerate(order) if row < rows and column < columns)
            for order in itertools.permutations(range(size))
        )
        assert total == pytest.approx(best)


def test_words_are_compared_by_their_counts() -> None:
    (row,) = Words().matrix(["a b"], ["a b", "B, a!", "a c", "d", ""])
    assert row == [pytest.approx(1), pytest.approx(1), pytest.approx(0.5), 0, 0]
    assert Words().matrix(["{}"], ["{}"]) == [[1.0]]
