"""Shares of an episode's trajectories, and the advantages that verl makes of them, by hand."""

from __future__ import annotations

import math

import pytest

from afm.harness.credit import Credit, MemberCredit, MemberPart, member_advantages, shares


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


MEMBERS = (
    # episode, member, score, own verdict, words
    ("e0", "planner", 1.0, 1.0, "a"),
    ("e0", "verifier", 1.0, 1.0, "x"),
    ("e0", "reflector", 1.0, 1.0, "r"),
    ("e1", "planner", 0.0, 0.0, "a"),
    ("e1", "verifier", 0.0, 0.0, "y"),
    ("e2", "planner", 0.0, 0.0, "b"),
    ("e2", "verifier", 0.0, 1.0, "z"),
)
"""A question with three episodes, scored 1, 0, 0: mean 1/3, std sqrt((4/9 + 1/9 + 1/9) / 2) = 0.57735.

The planner says the same in the first two, the verifier something else each time, the reflector speaks in the first.
"""
ADVANTAGES = {
    # (1 - 1/3) / std, (0 - 1/3) / std; each episode counts once, however many members speak in it
    MemberCredit.SHARED: (1.1547, 1.1547, 1.1547, -0.57735, -0.57735, -0.57735, -0.57735),
    # planner as above; verifier 1, 0, 1: mean 2/3, std 0.57735; the reflector has nothing to compare with
    MemberCredit.OWN: (1.1547, 0.57735, 0.0, -0.57735, -1.1547, -0.57735, 0.57735),
    # planner: e0 against e2: 1 - 0; e1 against e2: 0 - 0; e2 against e0 and e1: 0 - 1/2. verifier: against the two others:
    # 1 - 0, 0 - 1/2, 0 - 1/2. reflector: against e1 and e2, where it said nothing: 1 - 0. All over 0.57735.
    MemberCredit.DIFFERENCE: (1.73205, 1.73205, 1.73205, 0.0, -0.86603, -0.86603, -0.86603),
}


@pytest.mark.parametrize("credit", MemberCredit)
def test_a_member_gets_its_advantage_by_name(credit: MemberCredit) -> None:
    parts = [MemberPart("q", *part) for part in MEMBERS]
    other = [MemberPart("another question", f"o{number}", "planner", 7.0, 7.0, "a") for number in range(3)]
    twice = [*other, *parts, *parts[1:2]]  # a member with two conversations counts once
    got = member_advantages(twice, credit)
    assert got[3:-1] == pytest.approx(ADVANTAGES[credit], abs=1e-4)
    assert (got[:3], got[-1]) == ([0, 0, 0], got[4])
    whole = member_advantages(parts, credit, by_std=False)
    assert whole == pytest.approx([value * 0.57735 for value in ADVANTAGES[credit]], abs=1e-4)


def test_a_member_that_says_the_same_in_every_episode_made_no_difference() -> None:
    parts = [MemberPart("q", f"e{number}", "planner", float(number), 0.0, "same") for number in range(3)]
    assert member_advantages(parts, MemberCredit.DIFFERENCE) == [0, 0, 0]
