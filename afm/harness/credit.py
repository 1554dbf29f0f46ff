"""How the credit of an episode is shared over its trajectories.

An episode of a harness may hold several trajectories: each history that the program did not continue starts another
one. The episode has one score ``R``. Its advantage comes from the group of the episodes of its question, each counted
once, however many trajectories it has (GRPO, arXiv 2402.03300, section 4.1.2)::

    A_e = (R_e - mean(R)) / (std(R) + 1e-6)        mean and std over the scored episodes of the question
    A_i = share_i * A_e                            for every token of trajectory i that the model sampled

``std`` divides by the number of episodes less one, as verl's ``compute_grpo_outcome_advantage`` does. With
``norm_adv_by_std_in_grpo: false`` it is left out (Dr. GRPO, arXiv 2503.20783).

In an episode of a team each trajectory is a member's. :class:`MemberCredit` says which advantage ``A_e,m`` takes the
place of ``A_e`` in the trajectories of member m.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev

_EPSILON = 1e-6


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


class MemberCredit(StrEnum):
    """The advantage of a team's member, by name.

    ``R_e`` is the score of episode e, ``e`` and ``f`` are scored episodes of one question. Each counts once for a member,
    however many of its trajectories are the member's. ``std`` is as above.
    """

    SHARED = "shared"
    """``A_e,m = A_e``: every member gets the episode's."""
    OWN = "own"
    """``A_e,m = (r_e,m - mean_f(r_f,m)) / (std_f(r_f,m) + 1e-6)``, over the episodes f in which member m spoke.

    ``r_e,m`` is the member's own verdict, or ``R_e`` for a member without one. One episode alone gives 0."""
    DIFFERENCE = "difference"
    """``A_e,m = (R_e - mean_f(R_f)) / (std(R) + 1e-6)``, over the episodes f in which member m was replaced: it said
    something else than in e, or nothing. Without such an episode it is 0: the member made no difference.

    The other members were sampled again in f as well, so that ``mean(R_f)`` averages over what they say. If a member says
    something else in every episode, this is ``n / (n - 1)`` times the shared advantage of n episodes: it tells members
    apart only where what they say repeats."""


@dataclass(frozen=True, slots=True)
class MemberPart:
    """What a member did in an episode.

    Attributes:
        question: Whose group the episode belongs to.
        score: The episode's.
        own: The member's own verdict.
        words: Of what it said; equal where it said the same.
    """

    question: str
    episode: str
    member: str
    score: float
    own: float
    words: str


def member_advantages(
    parts: Sequence[MemberPart], credit: MemberCredit, *, by_std: bool = True
) -> list[float]:
    """The advantage of each part, by :class:`MemberCredit`.

    Args:
        parts: Of scored episodes; one of each member in each episode, or several that are equal.
        by_std: verl's ``norm_adv_by_std_in_grpo``.
    """
    groups: dict[str, set[MemberPart]] = defaultdict(set)
    for part in parts:
        groups[part.question].add(part)
    return [_advantage(part, groups[part.question], credit, by_std) for part in parts]


def _advantage(part: MemberPart, group: Iterable[MemberPart], credit: MemberCredit, by_std: bool) -> float:
    scores = {other.episode: other.score for other in group}
    own = {other.episode: other.own for other in group if other.member == part.member}
    same = {other.episode for other in group if (other.member, other.words) == (part.member, part.words)}
    match credit:
        case MemberCredit.SHARED:
            value, spread = part.score, [*scores.values()]
            compared = spread
        case MemberCredit.OWN:
            value, spread = part.own, [*own.values()]
            compared = spread
        case MemberCredit.DIFFERENCE:
            value, spread = part.score, [*scores.values()]
            compared = [score for episode, score in scores.items() if episode not in same]
    if not compared or len(spread) < 2:
        return 0.0
    return (value - fmean(compared)) / (stdev(spread) + _EPSILON if by_std else 1.0)
