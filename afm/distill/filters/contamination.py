"""Does a row hold questions of an evaluation set?"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pydantic import Field

from afm.agents import AgentSpec
from afm.datasets import read_tasks
from afm.distill.filters.base import FilterSettings, Rule
from afm.trajectory.hygiene import readable
from afm.trajectory.record import Record
from afm.trajectory.types import Author

_WORD = re.compile(r"[^\W_]+")


class Place(StrEnum):
    """Where evaluation questions are looked for."""

    QUESTION = "question"
    AGENT = "agent"
    OBSERVATIONS = "observations"


class ContaminationSettings(FilterSettings):
    """What is compared with what.

    Attributes:
        tasks: Evaluation sets, JSONL or parquet (:func:`afm.datasets.read_tasks`).
        ngram: A row that shares so many words in a row with an evaluation question is dropped; ``null``: only
            the same question counts. 13 is what GPT-3 used (arXiv 2005.14165, appendix C). Questions made from
            templates share long runs without being the same: use ``null`` there.
        places: Where n-grams are looked for. The whole question is only ever compared with the question.
    """

    tasks: tuple[Path, ...] = ()
    ngram: int | None = Field(default=13, ge=4)
    places: tuple[Place, ...] = (Place.QUESTION,)


@dataclass(frozen=True)
class ContaminationFilter(Rule):
    """Drops rows about questions that a model will be evaluated on.

    Texts are compared without letter case, punctuation, layout, hidden characters and ways to write the same letter. A question with fewer words than an n-gram
    is only found as a whole.

    Raises:
        DataError: An evaluation set cannot be read.
    """

    spec: AgentSpec
    settings: ContaminationSettings
    name: str = "contamination"
    _questions: dict[str, str] = field(init=False, repr=False, default_factory=dict)
    _ngrams: dict[int, str] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for path in self.settings.tasks:
            for task in read_tasks(path):
                words = _words(task.question)
                label = f"{task.id!r} of {path.name}"
                self._questions.setdefault(" ".join(words), label)
                for gram in self._grams(words):
                    self._ngrams.setdefault(gram, label)

    def reason(self, record: Record) -> str:
        """Which evaluation question is met, and where."""
        words = _words(record.question)
        if (label := self._questions.get(" ".join(words))) is not None:
            return f"the question is {label}"
        for place in self.settings.places if self._ngrams else ():
            for text in [words] if place is Place.QUESTION else map(_words, _texts(record, place)):
                label = next((self._ngrams[gram] for gram in self._grams(text) if gram in self._ngrams), None)
                if label is not None:
                    return f"{place.value} shares {self.settings.ngram} words in a row with {label}"
        return ""

    def _grams(self, words: list[str]) -> Iterator[int]:
        size = self.settings.ngram
        if size is not None:
            yield from (hash(tuple(words[at : at + size])) for at in range(len(words) - size + 1))


def _words(text: str) -> list[str]:
    if not text.isascii():
        text = unicodedata.normalize("NFKC", readable(text))
    return _WORD.findall(text.casefold())


def _texts(record: Record, place: Place) -> Iterable[str]:
    author = Author.AGENT if place is Place.AGENT else Author.ENVIRONMENT
    return (segment.text for segment in record.segments if segment.author is author)
