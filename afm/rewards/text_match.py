"""Short answers against the gold answers of a row: exact match, shared words, an answer inside a longer one."""

from __future__ import annotations

import ast
import json
import re
import string
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Literal

from afm.errors import DataError
from afm.rewards.base import Part, Sample, Scorer
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


class AnswerScorer(Scorer, ABC):
    """Compares final answers with gold answers: no score without a gold answer, 0 without an answer."""

    def accepted(self, ground_truth: Any) -> tuple[str, ...]:
        """The gold answers of a row.

        Raises:
            DataError: No gold answer that this scorer can compare with.
        """
        return gold_answers(ground_truth)

    @abstractmethod
    async def compare(
        self, accepted: tuple[str, ...], responses: tuple[str, ...], question: str = ""
    ) -> Part:
        """The part for final answers, of which there is at least one."""

    async def judge(self, sample: Sample) -> Part:
        """Compare the agent's final answers with the gold answers."""
        pair = self.answers_of(sample)
        return pair if isinstance(pair, Part) else await self.compare(*pair, sample.question)

    def answers_of(self, sample: Sample) -> tuple[tuple[str, ...], tuple[str, ...]] | Part:
        """Gold answers and the agent's own, or the part where one of them is missing."""
        try:
            accepted = self.accepted(sample.ground_truth)
        except DataError as error:
            return Part(None, error.message)
        responses = answers(sample.segments, sample.spec)
        return (accepted, responses) if responses else Part(0.0, "the response has no final answer")


class ExactMatch(AnswerScorer):
    """1 when the final answer is a gold answer, else 0."""

    def __init__(self, variant: MatchVariant = MatchVariant.TRAINING) -> None:
        self._variant = variant

    def counted(self, responses: tuple[str, ...]) -> tuple[str, ...]:
        """Those of several final answers that count."""
        return responses[:1] if self._variant is MatchVariant.EVALUATION else responses

    async def compare(
        self, accepted: tuple[str, ...], responses: tuple[str, ...], question: str = ""
    ) -> Part:
        """1 when every answer that counts is in ``accepted``."""
        golds, counted = {comparable(text) for text in accepted}, self.counted(responses)
        for text in counted:
            if comparable(text) not in golds:
                return Part(0.0, f"{text[:200]!r} is no gold answer")
        return Part(1.0, f"{' | '.join(counted)[:200]!r} is a gold answer")


class TokenF1(ExactMatch):
    """Harmonic mean of precision and recall of words, 0 to 1, with the closest gold answer (SQuAD).

    With several final answers the worst one counts in training, the first one in evaluation.
    """

    async def compare(
        self, accepted: tuple[str, ...], responses: tuple[str, ...], question: str = ""
    ) -> Part:
        """The lowest F1 of the answers that count."""
        scores = {text: max(token_f1(text, gold) for gold in accepted) for text in self.counted(responses)}
        text, score = min(scores.items(), key=lambda pair: pair[1])
        return Part(score, f"{text[:200]!r} has F1 {score:.3g} with the closest gold answer")


class Substring(ExactMatch):
    """1 when the final answer contains a gold answer word for word, else 0.

    Args:
        variant: With several final answers, whether all of them or the first must hold one.
        max_words: A longer answer scores 0: whoever lists everything has answered nothing.
    """

    def __init__(self, variant: MatchVariant = MatchVariant.TRAINING, max_words: int = 30) -> None:
        super().__init__(variant)
        self._max_words = max_words

    async def compare(
        self, accepted: tuple[str, ...], responses: tuple[str, ...], question: str = ""
    ) -> Part:
        """1 when every answer that counts holds one of ``accepted``."""
        golds, counted = [comparable(text) for text in accepted], self.counted(responses)
        for text in counted:
            bare = comparable(text)
            if len(bare.split()) > self._max_words:
                return Part(0.0, f"an answer of more than {self._max_words} words")
            if not any(f" {gold} " in f" {bare} " for gold in golds):
                return Part(0.0, f"{text[:200]!r} holds no gold answer")
        return Part(1.0, f"{' | '.join(counted)[:200]!r} holds a gold answer")


def token_f1(answer: str, gold: str) -> float:
    """F1 of the words of two normalised texts, or of the unchanged texts when normalising leaves nothing."""
    words, wanted = comparable(answer).split(), comparable(gold).split()
    shared = sum((Counter(words) & Counter(wanted)).values())
    return 2 * shared / (len(words) + len(wanted)) if shared else 0.0


def gold_answers(ground_truth: Any) -> tuple[str, ...]:
    """Accepted answers: a text, a number, a list, ``{"target": ...}``, or one of these as a JSON string.

    A text is read as JSON only when that gives a mapping with ``target`` or a list of texts, because
    ``[1, 2]`` and ``{3}`` are mathematical answers too.

    Raises:
        DataError: There is no answer in it.
    """
    golds = tuple(text for text in _texts(ground_truth) if text.strip())
    if not golds:
        raise DataError(
            f"ground truth {_short(ground_truth)} holds no answer; expected a text, a list of texts "
            'or {"target": [...]}'
        )
    return golds


def kind_of_gold(ground_truth: Any) -> Literal["tests", "result"] | None:
    """Whether a row's gold is tests of a program or a result; ``None`` where its look does not say. Nothing is unpacked."""
    value = ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return "result"
    if isinstance(value, Mapping):
        return kind_of_gold(value["target"]) if "target" in value else "tests"
    if not isinstance(value, list | tuple):
        return "result"
    if value and all(isinstance(item, Mapping) for item in value):
        return "tests"
    texts = [item for item in value if isinstance(item, str)]
    if len(texts) < len(value) or any(map(is_literal, texts)):
        return "result"
    return "tests" if any("assert" in item for item in texts) else None


def is_literal(text: str) -> bool:
    """Whether a text is a mere value in Python, which as a test every program would pass."""
    try:
        ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        return _of_text(value)
    if isinstance(value, bool) or value is None:
        return ()
    if isinstance(value, int | float):
        return (str(value),)
    if isinstance(value, Mapping):
        return _texts(value.get("target"))
    if hasattr(value, "tolist"):  # an array, as parquet readers give it
        return _texts(value.tolist())
    if isinstance(value, Iterable):
        return [text for item in value for text in ([item] if isinstance(item, str) else _texts(item))]
    return ()


def _of_text(text: str) -> Iterable[str]:
    if text.lstrip()[:1] in ("{", "["):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return (text,)
        if isinstance(data, dict) and "target" in data:
            return _texts(data["target"])
        if isinstance(data, list) and data and all(isinstance(item, str) for item in data):
            return data
    return (text,)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
