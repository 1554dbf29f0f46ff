"""Short answers against the gold answers of a row: exact match, shared words, an answer inside a longer one."""

from __future__ import annotations

import ast
import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Literal

from afm.errors import DataError
from afm.rewards.base import Part, Sample
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
        responses = answers(sample.segments, sample.spec)
        if not responses:
            return Part(0.0, "the response has no final answer")
        counted = responses[:1] if self._variant is MatchVariant.EVALUATION else responses
        for text in counted:
            if comparable(text) not in accepted:
                return Part(0.0, f"{text[:200]!r} is no gold answer")
        return Part(1.0, f"{' | '.join(counted)[:200]!r} is a gold answer")

    async def close(self) -> None:
        """Nothing to free."""


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
        responses = _counted(sample, self._variant)
        if not responses:
            return Part(0.0, "the response has no final answer")
        scores = [max(token_f1(text, gold) for gold in accepted) for text in responses]
        score = min(scores)
        return Part(
            score, f"{responses[scores.index(score)][:200]!r} has F1 {score:.3g} with the closest gold answer"
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
        responses = _counted(sample, self._variant)
        if not responses:
            return Part(0.0, "the response has no final answer")
        for text in responses:
            bare = normalised(text)
            if len(bare.split()) > self._max_words:
                return Part(0.0, f"an answer of more than {self._max_words} words")
            if not any(f" {gold} " in f" {bare} " for gold in accepted):
                return Part(0.0, f"{text[:200]!r} holds no gold answer")
        return Part(1.0, f"{' | '.join(responses)[:200]!r} holds a gold answer")

    async def close(self) -> None:
        """Nothing to free."""


def token_f1(answer: str, gold: str) -> float:
    """F1 of the words of two normalised texts, or of the texts as they stand when nothing is left of them."""
    words, wanted = comparable(answer).split(), comparable(gold).split()
    shared = sum((Counter(words) & Counter(wanted)).values())
    return 2 * shared / (len(words) + len(wanted)) if shared else 0.0


def _counted(sample: Sample, variant: MatchVariant) -> tuple[str, ...]:
    responses = answers(sample.segments, sample.spec)
    return responses[:1] if variant is MatchVariant.EVALUATION else responses


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
