"""Exact match of short answers, after the usual normalisation of open-domain question answering."""

from __future__ import annotations

import re
import string
from enum import StrEnum

from afm.errors import DataError
from afm.rewards.base import Sample
from afm.rewards.gold import gold_answers
from afm.rewards.part import Part
from afm.trajectory import answers

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class MatchVariant(StrEnum):
    """Which of several final answers count (AFM, multi-hop question answering)."""

    TRAINING = "training"
    """Every one must be a gold answer."""
    EVALUATION = "evaluation"
    """Only the first one counts."""


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, blanks collapsed (SQuAD's ``normalize_answer``)."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def comparable(text: str) -> str:
    """``text`` normalised, or in lower case only when nothing is left of it: "The The", "A", "?"."""
    return normalised(text) or " ".join(text.lower().split())


class ExactMatch:
    """1 when the final answer is a gold answer, else 0."""

    def __init__(self, variant: MatchVariant = MatchVariant.TRAINING) -> None:
        self._variant = variant

    async def judge(self, sample: Sample) -> Part:
        """Compare the agent's final answers with the gold answers."""
        try:
            accepted = {comparable(text) for text in gold_answers(sample.ground_truth)}
        except DataError as error:
            return Part(None, error.message)
        given = answers(sample.segments, sample.spec)
        if not given:
            return Part(0.0, "the response has no final answer")
        counted = given[:1] if self._variant is MatchVariant.EVALUATION else given
        for text in counted:
            if comparable(text) not in accepted:
                return Part(0.0, f"{text[:200]!r} is no gold answer")
        return Part(1.0, f"{' | '.join(counted)[:200]!r} is a gold answer")

    async def close(self) -> None:
        """Nothing to free."""
