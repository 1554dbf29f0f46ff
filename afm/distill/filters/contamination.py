"""Questions of evaluation sets in training rows.

Signs that change the question count as words: ``3.5 * 2`` is not ``35 / 2``, and ``x > 2`` is not ``x < 2``.
Punctuation in prose is ignored, because it may be changed to hide a copy. It matters between numbers and variables,
and within formulas.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pydantic import Field, model_validator

from afm.agents import AgentSpec
from afm.configuration import Settings
from afm.datasets import read_tasks
from afm.distill.filters.base import Rule
from afm.trajectory.observation import readable
from afm.trajectory.record import Record
from afm.trajectory.tags import Author

_OPERATORS = "-+*/^<>=!.#"
MARKS = f"\ue000-{chr(0xE000 + len(_OPERATORS) - 1)}"
"""Characters that :func:`with_marks` writes for signs, for a character class of a regular expression."""
_MARK_OF_SIGN = {sign: f" {chr(0xE000 + place)} " for place, sign in enumerate(_OPERATORS)}
_DASHES, _TIMES, _DIVIDED = "\u2010\u2011\u2012\u2013\u2014\u2212", "\u00d7\u22c5\u00b7", "\u00f7\u2215"
_SAME = str.maketrans(
    dict.fromkeys(_DASHES, "-")
    | dict.fromkeys(_TIMES, "*")
    | dict.fromkeys(_DIVIDED, "/")
    | {"\u2264": "<=", "\u2265": ">="}
    | dict.fromkeys(map(chr, range(0xE000, 0xE000 + len(_OPERATORS))), " ")
)
_FORMULA = re.compile(
    r"\$\$.{1,2000}?\$\$|\$(?=[^\s$])[^$]{0,1000}?(?<=[^\s$])\$(?!\d)|\\\(.{1,1000}?\\\)|\\\[.{1,2000}?\\\]",
    re.DOTALL,
)
_ANY = re.compile(f"[{re.escape(_OPERATORS)}]")
_SIGNS = re.compile(r"(?<=\d)\.(?=\d)|[-+*/^<>=]+|[!#]")
_LAST = re.compile(r"(?:[\d)\]}]|(?<![^\W\d_])[^\W\d_])\s*\Z")
"""A number, a closing bracket or a single letter at the end."""
_FIRST = re.compile(r"\s*(?:[-+\d(\[{\\$]|[^\W\d_](?![^\W\d_]))")
"""A number with its sign, an opening bracket, a LaTeX command or a single letter at the beginning."""
_ARTICLE = re.compile(r"\s+(?:a|A|I)\s+[^\W\d_]{2}")
"""One-letter words before another word. A dash before them is punctuation."""
_NUMBER = re.compile(r"[\d.(]|[^\W\d_](?![^\W_])")
_TAG = re.compile(
    r"</?(?:b|i|u|p|em|br|hr|strong|code|pre|li|ul|ol|h\d|span|div|center)\s*/?>", re.IGNORECASE
)
_LONGEST = 3
_NEAR = 8


def with_marks(text: str) -> str:
    r"""Return ``text`` with normalised letters, and a separate character, surrounded by spaces, for each significant sign.

    Significant signs are operators within formulas (``$...$``, ``\(...\)``, ``\[...\]``), operators between numbers
    and single letters, the sign of a number, decimal points, and the signs of ``C++`` and ``C#``. All others are
    unchanged. Simple HTML tags are removed.
    """
    if "<" in text:
        text = _TAG.sub(" ", text)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", readable(text)).translate(_SAME)
    if _ANY.search(text) is None:
        return text
    formulas = [match.span() for match in _FORMULA.finditer(text)]
    starts = [start for start, _ in formulas]

    def mark(match: re.Match[str]) -> str:
        signs = match[0]
        if set(signs) == {"-"} and len(signs) <= _LONGEST:
            signs = "-"
        place = bisect_right(starts, match.start()) - 1
        inside = place >= 0 and match.start() < formulas[place][1]
        if len(signs) <= _LONGEST and (inside or _matters(text, match)):
            return "".join(_MARK_OF_SIGN[sign] for sign in signs)
        return match[0]

    return _SIGNS.sub(mark, text)


def _matters(text: str, match: re.Match[str]) -> bool:
    """Return whether signs outside of formulas are significant."""
    start, end, signs = match.start(), match.end(), match[0]
    if signs == ".":
        return True
    before, after = text[max(0, start - _NEAR) : start], text[end : end + _NEAR]
    alone = bool(before) and bool(_LAST.search(before)) and not before[-1].isspace()
    if signs in ("#", "++"):
        if alone and before[-1].isalpha():
            return True
        if signs == "#":
            return False
    if signs == "!":
        return False
    if signs == "-" and before[-1:].isspace() and _ARTICLE.match(after):
        return False
    if _LAST.search(before) and _FIRST.match(after):
        return True
    ends = before.rstrip()
    opened = not before or before[-1].isspace() or ends[-1:] in "([{,=<>*/^+"
    return signs in ("-", "+") and opened and bool(_NUMBER.match(after))


CHINESE_JAPANESE = "\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Letters of scripts without spaces between words, for a character class of a regular expression."""
_WORD = re.compile(f"[{CHINESE_JAPANESE}]|[^\\W_{CHINESE_JAPANESE}]+")
"""A word, or one letter of these scripts."""
_WORD_OR_MARK = re.compile(f"[{MARKS}]|{_WORD.pattern}")
_MARK = re.compile(f"[{MARKS}]")


class SearchedText(StrEnum):
    """A text in which to search for evaluation questions."""

    QUESTION = "question"
    AGENT = "agent"
    OBSERVATIONS = "observations"


class ContaminationSettings(Settings):
    """The evaluation sets, and how to compare rows with them."""

    tasks: tuple[Path, ...] = ()
    """Evaluation sets, JSONL or parquet (:func:`afm.datasets.read_tasks`)."""
    ngram: int | None = Field(default=13, ge=4, le=100)
    """A row that shares this many consecutive words with an evaluation question is dropped. With ``null`` only the same
    question counts. GPT-3 used 13 (arXiv 2005.14165, appendix C). Use ``null`` for questions made from templates, which
    share long runs of words without being the same."""
    shortest: int = Field(default=8, ge=1, le=100)
    """A question of fewer words than ``ngram``, but at least this many, is searched as a whole (8 in the same appendix).
    A shorter one is found only as the same question."""
    places: tuple[SearchedText, ...] = (SearchedText.QUESTION,)
    """Texts in which to search for n-grams. Whole questions are compared only with the question."""

    @model_validator(mode="after")
    def _somewhere(self) -> ContaminationSettings:
        if self.ngram is not None and not self.places:
            raise ValueError(
                "places: got none; name one of question, agent, observations, or set `ngram: null` to compare whole questions only"
            )
        return self


@dataclass(frozen=True)
class ContaminationFilter(Rule):
    """Drops rows that contain questions of an evaluation set.

    The comparison ignores case, punctuation, layout, hidden characters and variants of the same letter. Operators
    between numbers and within formulas are not punctuation: ``3.5 * 2`` is not ``35 / 2``.

    Raises:
        DataError: An evaluation set cannot be read.
    """

    spec: AgentSpec
    settings: ContaminationSettings
    name: str = "contamination"
    _questions: dict[str, str] = field(init=False, repr=False, default_factory=dict)
    _ngrams: dict[int, dict[int, str]] = field(init=False, repr=False, default_factory=dict)
    """Hashes of n-grams with their question, by length."""

    def __post_init__(self) -> None:
        for path in self.settings.tasks:
            for task in read_tasks(path):
                words = _words(task.question)
                label = f"{task.id!r} of {path.name}"
                self._questions.setdefault(" ".join(words), label)
                if self.settings.ngram is None or len(words) < self.settings.shortest:
                    continue
                length = min(len(words), self.settings.ngram)
                known = self._ngrams.setdefault(length, {})
                for gram in _grams(words, length):
                    known.setdefault(gram, label)

    def reason(self, record: Record) -> str:
        """Return the evaluation question that matches, and where."""
        words = _words(record.question)
        if (label := self._questions.get(" ".join(words))) is not None:
            return f"the question is {label}"
        for place in self.settings.places if self._ngrams else ():
            for text in [words] if place is SearchedText.QUESTION else map(_words, _texts(record, place)):
                for length, known in self._ngrams.items():
                    label = next((known[gram] for gram in _grams(text, length) if gram in known), None)
                    if label is not None:
                        return f"{place.value} shares {length} words in a row with {label}"
        return ""


def _grams(words: list[str], length: int) -> Iterator[int]:
    return (hash(tuple(words[at : at + length])) for at in range(len(words) - length + 1))


def _words(text: str) -> list[str]:
    """Return the words, each with the significant signs before it, so that signs do not count as words."""
    text = with_marks(text).casefold()
    if text.isascii() or _MARK.search(text) is None:
        return _WORD.findall(text)
    words, signs = list[str](), ""
    for token in _WORD_OR_MARK.findall(text):
        if _MARK.match(token):
            signs += token
        else:
            words.append(signs + token)
            signs = ""
    return [*words[:-1], words[-1] + signs] if words else [signs]


def _texts(record: Record, place: SearchedText) -> Iterable[str]:
    author = Author.AGENT if place is SearchedText.AGENT else Author.ENVIRONMENT
    return (segment.text for segment in record.segments if segment.author is author)
