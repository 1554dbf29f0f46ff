"""Softer comparisons of short answers: shared words, and an answer inside a longer one."""

from __future__ import annotations

from collections import Counter

from afm.errors import DataError
from afm.rewards.base import Sample
from afm.rewards.exact_match import MatchVariant, comparable, normalised
from afm.rewards.gold import gold_answers
from afm.rewards.part import Part
from afm.trajectory import answers


class TokenF1:
    """Harmonic mean of precision and recall of words, 0 to 1, with the closest gold answer (SQuAD).

    With several final answers the worst one counts in training, the first one in evaluation.
    """

    def __init__(self, variant: MatchVariant = MatchVariant.TRAINING) -> None:
        self._variant = variant

    async def judge(self, sample: Sample) -> Part:
        """Compare the words of the agent's final answers with those of the gold answers."""
        try:
            accepted = gold_answers(sample.ground_truth)
        except DataError as error:
            return Part(None, error.message)
        given = _counted(sample, self._variant)
        if not given:
            return Part(0.0, "the response has no final answer")
        scores = [max(token_f1(text, gold) for gold in accepted) for text in given]
        score = min(scores)
        return Part(
            score, f"{given[scores.index(score)][:200]!r} has F1 {score:.3g} with the closest gold answer"
        )

    async def close(self) -> None:
        """Nothing to free."""


class Substring:
    """1 when a gold answer stands, word for word, in the final answer, else 0.

    Args:
        variant: With several final answers, whether all of them or the first must hold one.
        max_words: A longer answer scores 0: whoever lists everything has answered nothing.
    """

    def __init__(self, variant: MatchVariant = MatchVariant.TRAINING, max_words: int = 30) -> None:
        self._variant = variant
        self._max_words = max_words

    async def judge(self, sample: Sample) -> Part:
        """Look for a gold answer in the agent's final answers."""
        try:
            accepted = [gold for gold in map(normalised, gold_answers(sample.ground_truth)) if gold]
        except DataError as error:
            return Part(None, error.message)
        given = _counted(sample, self._variant)
        if not given:
            return Part(0.0, "the response has no final answer")
        for text in given:
            bare = normalised(text)
            if len(bare.split()) > self._max_words:
                return Part(0.0, f"an answer of more than {self._max_words} words")
            if not any(f" {gold} " in f" {bare} " for gold in accepted):
                return Part(0.0, f"{text[:200]!r} holds no gold answer")
        return Part(1.0, f"{' | '.join(given)[:200]!r} holds a gold answer")

    async def close(self) -> None:
        """Nothing to free."""


def token_f1(answer: str, gold: str) -> float:
    """F1 of the words of two normalised texts, or of the texts as they stand when nothing is left of them."""
    given, wanted = comparable(answer).split(), comparable(gold).split()
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted)) if shared else 0.0


def _counted(sample: Sample, variant: MatchVariant) -> tuple[str, ...]:
    given = answers(sample.segments, sample.spec)
    return given[:1] if variant is MatchVariant.EVALUATION else given
