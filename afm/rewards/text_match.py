"""Compare short answers with gold answers: exact match, word overlap, substring, letter of an option."""

from __future__ import annotations

import ast
import json
import re
import string
import unicodedata
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
    """Which of several final answers count, as in AFM's multi-hop question answering."""

    TRAINING = "training"
    """Every answer must be a gold answer."""
    EVALUATION = "evaluation"
    """Only the first answer counts."""


def normalised(text: str) -> str:
    """Lower-case ``text``, drop punctuation and articles, and collapse whitespace (SQuAD's ``normalize_answer``)."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def comparable(text: str) -> str:
    """Normalise ``text``. Text that normalises to nothing ("The The", "A", "?") is only lower-cased."""
    return normalised(text) or " ".join(text.lower().split())


class AnswerScorer(Scorer, ABC):
    """Compares final answers with gold answers. It abstains without a gold answer and scores 0 without a final answer."""

    def accepted(self, ground_truth: Any) -> tuple[str, ...]:
        """Return the gold answers of a row.

        Raises:
            DataError: The row has no gold answer that this scorer can use.
        """
        return gold_answers(ground_truth)

    @abstractmethod
    async def compare(
        self, accepted: tuple[str, ...], responses: tuple[str, ...], question: str = ""
    ) -> Part:
        """Score at least one final answer."""

    async def judge(self, sample: Sample) -> Part:
        """Compare the agent's final answers with the gold answers."""
        pair = self.answers_of(sample)
        return pair if isinstance(pair, Part) else await self.compare(*pair, sample.question)

    def answers_of(self, sample: Sample) -> tuple[tuple[str, ...], tuple[str, ...]] | Part:
        """Return the gold answers and the agent's answers, or the part to report if either is missing."""
        try:
            accepted = self.accepted(sample.ground_truth)
        except DataError as error:
            return Part(None, error.message)
        responses = answers(sample.segments, sample.spec)
        return (accepted, responses) if responses else Part(0.0, "the response has no final answer")


class ExactMatch(AnswerScorer):
    """Scores 1 if the final answer is a gold answer, else 0."""

    def __init__(self, variant: MatchVariant = MatchVariant.TRAINING) -> None:
        self._variant = variant

    def counted(self, responses: tuple[str, ...]) -> tuple[str, ...]:
        """Return the final answers that count."""
        return responses[:1] if self._variant is MatchVariant.EVALUATION else responses

    async def compare(
        self, accepted: tuple[str, ...], responses: tuple[str, ...], question: str = ""
    ) -> Part:
        """Score 1 if every answer that counts is in ``accepted``."""
        golds, counted = {comparable(text) for text in accepted}, self.counted(responses)
        for text in counted:
            if comparable(text) not in golds:
                return Part(0.0, f"{text[:200]!r} is not a gold answer")
        return Part(1.0, f"{' | '.join(counted)[:200]!r} is a gold answer")


class TokenF1(ExactMatch):
    """Scores the word F1 with the closest gold answer, 0 to 1 (SQuAD).

    Of several final answers, the worst counts in training and the first in evaluation.
    """

    async def compare(
        self, accepted: tuple[str, ...], responses: tuple[str, ...], question: str = ""
    ) -> Part:
        """Return the lowest F1 of the answers that count."""
        scores = {text: max(token_f1(text, gold) for gold in accepted) for text in self.counted(responses)}
        text, score = min(scores.items(), key=lambda pair: pair[1])
        return Part(score, f"{text[:200]!r} has F1 {score:.3g} with the closest gold answer")


class Substring(ExactMatch):
    """Scores 1 if the final answer contains a gold answer word for word, else 0.

    Args:
        variant: Of several final answers, whether all or only the first must contain a gold answer.
        max_words: A longer answer scores 0, because a list of everything answers nothing.
    """

    def __init__(self, variant: MatchVariant = MatchVariant.TRAINING, max_words: int = 30) -> None:
        super().__init__(variant)
        self._max_words = max_words

    async def compare(
        self, accepted: tuple[str, ...], responses: tuple[str, ...], question: str = ""
    ) -> Part:
        """Score 1 if every answer that counts contains one of ``accepted``."""
        golds, counted = [comparable(text) for text in accepted], self.counted(responses)
        for text in counted:
            bare = comparable(text)
            if len(bare.split()) > self._max_words:
                return Part(0.0, f"an answer of more than {self._max_words} words")
            if not any(f" {gold} " in f" {bare} " for gold in golds):
                return Part(0.0, f"{text[:200]!r} holds no gold answer")
        return Part(1.0, f"{' | '.join(counted)[:200]!r} holds a gold answer")


def token_f1(answer: str, gold: str) -> float:
    """Return the word F1 of two normalised texts. Texts that normalise to nothing are compared unchanged."""
    words, wanted = comparable(answer).split(), comparable(gold).split()
    shared = sum((Counter(words) & Counter(wanted)).values())
    return 2 * shared / (len(words) + len(wanted)) if shared else 0.0


def gold_answers(ground_truth: Any) -> tuple[str, ...]:
    """Return the accepted answers in a text, a number, a list, ``{"target": ...}``, or JSON of one of these.

    Text is read as JSON only if it is a mapping with ``target`` or a list of texts, because ``[1, 2]`` and ``{3}`` are
    mathematical answers too.

    Raises:
        DataError: It contains no answer.
    """
    golds = tuple(text for text in _texts(ground_truth) if text.strip())
    if not golds:
        raise DataError(
            f"ground truth {_short(ground_truth)} holds no answer; expected a text, a list of texts "
            'or {"target": [...]}'
        )
    return golds


def kind_of_gold(ground_truth: Any) -> Literal["tests", "result"] | None:
    """Return whether a row's gold is tests of a program or a result, or ``None`` if unclear. Packed tests stay packed."""
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
    """Return whether ``text`` is only a Python literal. As a test, every program would pass it."""
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


_DRESS = re.compile(
    r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}|\*+|(?<!\w)_+|_+(?!\w)|\$|`|\\[()\[\]]"
)
_BLANK = re.compile(r"\\[ ,;:!]|~")
_LEAD = (
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:i\s+(?:choose|pick)|it['’]s|it\s+is"
    r"|(?:(?:the|my|final|correct|best|right)\s+)*(?:answer|option|choice|letter)s?\s*(?:is|are)?\s*[:=]?)?\s*"
    r"(?:(?:option|choice|letter)\s+)?"
)
_IS_RIGHT = (
    r"is\s+(?:clearly\s+|indeed\s+|definitely\s+|the\s+)*"
    r"(?:(?:correct|right|best)(?:\s+(?:answer|option|choice|one))?|answer|option|choice)\b[.,:;!]?"
)
_LETTER = re.compile(
    rf"(?:{_LEAD})?[(\[{{\"']?([A-Za-z])(?:(?:[)\]]?\s+(?:{_IS_RIGHT}|[-\u2013\u2014])|[)\]}}\"'][.:,]?|[.,:])(?:\s+(.*))?"
    r"|\s+(\(.*\)))?",
    re.DOTALL | re.IGNORECASE,
)
_VERBS = r"(?:is|are|was|seems?|looks?|may|might|could|or|and|too|also|instead)\b"
_MENTION = re.compile(  # an option: (b), or a capital that is not a word (a cat, I), a unit (5 J) or a symbol (F = ma)
    r"[(\[](?P<inside>[A-Ja-j])[)\]]"
    r"|(?<=[:;,] )(?P<small>[b-hj])(?=\W*$)"
    rf"|(?<![\w°'’-])(?<!\d )(?P<bare>[B-HJ]|A(?!\s+(?!{_VERBS})[a-z])|I(?!\s+[a-z]|['’]))(?![\w'’+-]|\s*=)"
)
_OPTION = r"[(\[]?(?P<{}>[A-HJ]|I(?!\s+[a-z]))\b"
_CLAIM = re.compile(  # an option is called the answer
    rf"(?i:\b(?:answer|option|choice)s?\b[^.;]{{0,20}}?\b(?:is|are|be)\b)\W*{_OPTION.format('named')}"
    rf"|{_OPTION.format('right')}[)\]]?\s+is\s+(?:also\s+)?(?:right|correct)"
    r"|(?i:\b(?:or|so|thus|hence|therefore|choose|pick|take|instead|rather|actually|maybe|perhaps)\b)\W+"
    rf"(?:(?i:the|answer|option|choice|is)\s+)*{_OPTION.format('chosen')}"
)
_NOT = r"(?:\s+not|n['’]t)\s+(?:the\s+)?"
_WRONG = rf"(?:is|was)(?:{_NOT}(?:right|correct|answer|best)|\s+(?:wrong|incorrect|false))\b"
_OTHERS = r"(?:[(\[]?[A-J][)\]]?(?:\s*,|\s+(?:and|or|nor))\s*)+(?:and\s+|or\s+)?[(\[]?[A-J]\b[)\]]?"
_REFUSED = re.compile(
    rf"(?i:\b(?:not|unlike|instead\s+of|rather\s+than))\s+(?P<others>{_OTHERS})"
    rf"|(?P<both>{_OTHERS})\s+are\s+(?i:(?:all|both)\s+)?(?i:wrong|incorrect|false)\b"
    rf"|(?i:\b(?:not|unlike|instead\s+of|rather\s+than))\s+{_OPTION.format('a')}[)\]]?"
    rf"|{_OPTION.format('b')}[)\]]?\s+{_WRONG}"
)
_RETRACTION = re.compile(
    r"\b(?:on\s+second\s+thoughts?|scratch\s+that|take\s+(?:it|that|this)\s+back|never\s?mind|just\s+kidding|"
    r"my\s+mistake|i\s+was\s+wrong|correction|oops|wait)\b"
    rf"|\b(?:which|this|that|it)\s+{_WRONG}"
    r"|\b(?:or|and|also)\s+(?:maybe\s+|perhaps\s+)?the\s+(?:other|first|second|third|fourth|last|next)\b",
    re.IGNORECASE,
)
_REASON = re.compile(r"(?:because|since|as)\b", re.IGNORECASE)  # it may name the other options
_LONGEST = 2000


def choice_letter(text: str, question: str = "") -> str | None:
    r"""Return the option that ``text`` names, as a capital letter; ``None`` if it names none, several, or takes it back.

    Accepted forms: ``C``, ``(c)``, ``C.``, ``C) because A is wrong``, ``\boxed{C}``, ``**C**``, ``Answer: C``,
    ``C is correct``, ``C, not D``. A letter that begins a sentence, as in ``A cat``, is not an option. The text of an
    option, as ``question`` has it after the letter, may contain any letters.
    """
    bare = _BLANK.sub(" ", unicodedata.normalize("NFKC", text[:_LONGEST]))
    for _ in range(3):
        bare = _DRESS.sub(lambda match: match[1] or "", bare)
    named = _LETTER.fullmatch(bare.strip())
    if named is None:
        return None
    letter, rest = named[1].upper(), " ".join((named[2] or named[3] or "").split())
    return None if rest and _takes_back(letter, rest, question) else letter


def _takes_back(letter: str, rest: str, question: str) -> bool:
    """Return whether the text after the letter names another option or denies this one."""
    option = rf"\b{letter}\s*[).:\]]\s*{re.escape(rest.rstrip('. '))}"
    if re.search(option, " ".join(question.split())):
        return False
    for refused in _REFUSED.finditer(rest):
        if letter in re.findall(
            r"\b[A-J]\b", refused["others"] or refused["both"] or refused["a"] or refused["b"]
        ):
            return True
    rest, reason = _REFUSED.sub("", rest), _REASON.match(rest) is not None
    claims = {option for claim in _CLAIM.finditer(rest) for option in claim.groups() if option}
    mentions = {
        option.upper() for mention in _MENTION.finditer(rest) for option in mention.groups() if option
    }
    return bool((claims if reason else claims | mentions) - {letter}) or (
        not reason and _RETRACTION.search(rest) is not None
    )


class ChoiceLetter(AnswerScorer):
    """Scores 1 if the final answer names the gold option and no other, else 0."""

    def accepted(self, ground_truth: Any) -> tuple[str, ...]:
        """Return the letter of the gold option."""
        golds = gold_answers(ground_truth)
        wanted = choice_letter(golds[0])
        if wanted is None or len(golds) > 1:
            raise DataError(f"ground truth {golds[0][:80]!r}: expected the letter of one option")
        return (wanted,)

    async def compare(
        self, accepted: tuple[str, ...], responses: tuple[str, ...], question: str = ""
    ) -> Part:
        """Compare the letter of the final answer with the gold letter."""
        (wanted,) = accepted
        letters = {choice_letter(text, question) for text in responses}
        if letters == {wanted}:
            return Part(1.0, f"option {wanted} is right")
        shown = ", ".join(sorted(letter or "none" for letter in letters))
        return Part(0.0, f"option named: {shown}, right: {wanted}")
