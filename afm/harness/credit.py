"""Distribute the advantage of an episode over its trajectories.

An episode of a harness can have several trajectories: each history that the program does not continue starts a new
one. The episode has one score ``R``. Its advantage is computed over the episodes of its question. Each episode counts
once, however many trajectories it has (GRPO, arXiv 2402.03300, section 4.1.2)::

    A_e = (R_e - mean(R)) / (std(R) + 1e-6)        mean and std over the scored episodes of the question
    A_i = share_i * A_e                            for every token of trajectory i that the model sampled

``std`` divides by the number of episodes minus one, as verl's ``compute_grpo_outcome_advantage`` does.
``norm_adv_by_std_in_grpo: false`` omits it (Dr. GRPO, arXiv 2503.20783).

In an episode of a team, each trajectory belongs to one member. :class:`MemberCredit` defines the advantage ``A_e,m``
that replaces ``A_e`` in the trajectories of member m.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev

_EPSILON = 1e-6


class Credit(StrEnum):
    """Rules for the share of each trajectory in its episode's advantage.

    ``m_i`` is the number of turns of trajectory i. A turn that several trajectories share counts in the first of them.
    """

    ALL = "all"
    """``share_i = 1``: every trajectory gets the episode's full advantage."""
    LAST = "last"
    """Trains only the trajectory with the last generation, with share 1 and with all of its turns."""
    BY_TURN = "by_turn"
    """``share_i = m_i / sum(m)``: the shares of an episode add up to 1, so an episode with many trajectories has the
    same weight as an episode with one."""


def shares(turns: Sequence[int], credit: Credit, last: int = -1) -> tuple[float, ...]:
    """Return the share of each trajectory in its episode's advantage.

    >>> shares([3, 1], Credit.BY_TURN)
    (0.75, 0.25)

    Args:
        turns: Number of generations of each trajectory, at least 1, in the order in which the trajectories began.
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
    """Rules for the advantage of a team's member.

    ``R_e`` is the score of episode e. ``e`` and ``f`` are scored episodes of one question. Each episode counts once for a
    member, however many trajectories the member has in it. ``std`` is defined in the module's docstring.
    """

    SHARED = "shared"
    """``A_e,m = A_e``: every member gets the episode's advantage."""
    OWN = "own"
    """``A_e,m = (r_e,m - mean_f(r_f,m)) / (std_f(r_f,m) + 1e-6)``, over the episodes f in which member m spoke.

    ``r_e,m`` is the member's own verdict, or ``R_e`` for a member without one. A single episode gives 0."""
    DIFFERENCE = "difference"
    """``A_e,m = (R_e - mean_f(R_f)) / (std(R) + 1e-6)``, over the episodes f in which member m was replaced: its
    words differ from those in e, or it did not speak. Without any f the advantage is 0.

    The other members were also sampled again in f, so ``mean(R_f)`` averages over their words. If a member's words differ
    in every episode, this is ``n / (n - 1)`` times the shared advantage of n episodes. It distinguishes members only
    where their words repeat."""


@dataclass(frozen=True, slots=True)
class MemberPart:
    """A member's part in an episode.

    Attributes:
        question: Question whose group the episode belongs to.
        score: Score of the episode.
        own: The member's own verdict.
        words: Digest of the member's words: equal for equal words.
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
    """Return the advantage of each part by the rule ``credit``.

    Args:
        parts: Parts in scored episodes: one for each member and episode, or several equal ones.
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
