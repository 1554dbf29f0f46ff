"""How the credit of an episode is shared over its trajectories.

An episode of a harness may hold several trajectories: each history that the program did not continue starts another
one. The episode has one score ``R``. Its advantage comes from the group of the episodes of its question, each counted
once, however many trajectories it has (GRPO, arXiv 2402.03300, section 4.1.2)::

    A_e = (R_e - mean(R)) / (std(R) + 1e-6)        mean and std over the scored episodes of the question
    A_i = share_i * A_e                            for every token of trajectory i that the model sampled

``std`` divides by the number of episodes less one, as verl's ``compute_grpo_outcome_advantage`` does. With
``norm_adv_by_std_in_grpo: false`` it is left out (Dr. GRPO, arXiv 2503.20783).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class Credit(StrEnum):
    """The share of each trajectory in its episode's advantage, by name.

    ``m_i`` are the turns of trajectory i; a turn that several trajectories share counts in the first of them.
    """

    ALL = "all"
    """``share_i = 1``: every trajectory is trained as if the episode were its own."""
    LAST = "last"
    """Only the trajectory with the last generation is trained, with share 1, all of its turns included."""
    BY_TURN = "by_turn"
    """``share_i = m_i / sum(m)``: the shares of an episode add up to 1, so that an episode with many trajectories
    weighs no more than one with a single one."""


def shares(turns: Sequence[int], credit: Credit, last: int = -1) -> tuple[float, ...]:
    """The share of each trajectory in its episode's advantage.

    >>> shares([3, 1], Credit.BY_TURN)
    (0.75, 0.25)

    Args:
        turns: Generations of each trajectory, each at least 1, in the order in which the trajectories began.
        last: Index of the trajectory with the episode's last generation.
    """
    match credit:
        case Credit.ALL:
            return (1.0,) * len(turns)
        case Credit.LAST:
            place = last % len(turns)
            return tuple(float(number == place) for number in range(len(turns)))
        case Credit.BY_TURN:
            return tuple(count / sum(turns) for count in turns)
