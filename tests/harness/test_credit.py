"""Shares of an episode's trajectories, and the advantages that verl makes of them, by hand."""

from __future__ import annotations

import math

import pytest

from afm.harness.credit import Credit, shares


@pytest.mark.parametrize(
    ("credit", "expected"),
    [(Credit.ALL, (1, 1, 1)), (Credit.LAST, (0, 0, 1)), (Credit.BY_TURN, (0.5, 0.25, 0.25))],
)
def test_an_episode_shares_its_advantage_by_name(credit: Credit, expected: tuple[float, ...]) -> None:
    """Three trajectories of 4, 2 and 2 turns."""
    assert shares([4, 2, 2], credit) == expected
    assert shares([7], credit) == (1,)
    if credit is Credit.BY_TURN:
        assert math.isclose(sum(shares([3, 7, 1], credit)), 1)
