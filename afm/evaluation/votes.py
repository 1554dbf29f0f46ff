"""Majority vote over the rounds of a question, as test-time scaling without a judge."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from afm.evaluation.agents import Agents
from afm.rewards.exact_match import comparable
from afm.trajectory import answers
from afm.trajectory.record import Record
from afm.trajectory.types import Segment


@dataclass(frozen=True, slots=True, order=True)
class Vote:
    """What one round answers, empty when it has no answer; and whether it passed."""

    round: int
    answer: str
    passed: bool


class VoteTally:
    """Collects the answers of all rounds; the agents say where their answers are."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._votes: defaultdict[str, list[Vote]] = defaultdict(list)

    def add(self, task: str, record: Record, *, passed: bool) -> None:
        """Count one scored episode."""
        segments = [Segment(part.author, part.text) for part in record.segments]
        parts = sorted({comparable(part) for part in answers(segments, self._agents.declared(record))})
        number = record.provenance.get("round", 0)
        self._votes[task].append(Vote(number if isinstance(number, int) else 0, " | ".join(parts), passed))

    def share(self) -> float | None:
        """Share of questions whose chosen round passed; ``None`` without questions."""
        chosen = [majority(votes).passed for votes in self._votes.values()]
        return sum(chosen) / len(chosen) if chosen else None


def majority(votes: Sequence[Vote]) -> Vote:
    """The first round that gives the most frequent answer; among equally frequent ones the one given first.

    Rounds without an answer have no vote, unless none has one. Equal is what exact match calls equal.
    """
    ordered = sorted(votes)
    counts = Counter(vote.answer for vote in ordered if vote.answer)
    if not counts:
        return ordered[0]
    most = max(counts.values())
    return next(vote for vote in ordered if counts[vote.answer] == most)
