"""The closed encyclopaedia: any entity, fact or page from its number, in constant time and memory."""

from __future__ import annotations

from dataclasses import dataclass

from afm.datasets.encyclopaedia.names import Names
from afm.datasets.encyclopaedia.permutation import Permutation
from afm.datasets.encyclopaedia.relations import (
    ABOUT,
    ATTRIBUTE_OF,
    OF_KIND,
    RELATION,
    RELATIONS,
    SHARES,
    TOLD_OF,
    Attribute,
    Kind,
    Relation,
    brief,
)
from afm.errors import ConfigError

LEAST, MOST = 40, 16_000_000
"""Entities of the smallest and the largest world."""


@dataclass(frozen=True, slots=True)
class Link:
    """Where the name of another entity stands in a page's text, by character."""

    start: int
    end: int
    target: int


@dataclass(frozen=True, slots=True)
class Page:
    """One entity's page.

    Attributes:
        number: The entity; the passage's id in the corpus is the same number as text.
        links: In the order of the text; they never overlap.
    """

    number: int
    title: str
    text: str
    links: tuple[Link, ...]

    @property
    def contents(self) -> str:
        """Title in quotes, a line feed, text: the passage layout of Search-R1."""
        return f'"{self.title}"\n{self.text}'


class Encyclopaedia:
    """A world of ``size`` entities with one page each, wholly determined by its arguments.

    Args:
        size: Entities and pages.
        seed: Fixes names, facts and wording.
        wordings: 1 tells every fact in the same words, 2 varies.
        brief: Pages are tables, a line a fact such as ``Mayor Ba Ka.``, and name their entity at the top only.

    Raises:
        ConfigError: The size is not from 40 to 16 million.
    """

    def __init__(self, size: int, *, seed: int = 0, wordings: int = 1, brief: bool = False) -> None:
        if not LEAST <= size <= MOST:
            raise ConfigError(f"size: got {size:,} pages, expected {LEAST} to {MOST:,}")
        if wordings not in (1, 2):
            raise ConfigError(f"wordings: got {wordings}, expected 1 or 2")
        self.size, self.seed, self.wordings, self.brief = size, seed, wordings, brief
        key = f"encyclopaedia/{size}/{seed}"
        counts = {kind: max(2, size * share // 100) for kind, share in SHARES.items()}
        counts[Kind.PERSON] = size - sum(counts.values())
        self.ranges: dict[Kind, range] = {}
        begin = 0
        for kind in Kind:
            self.ranges[kind] = range(begin, begin + counts[kind])
            begin += counts[kind]
        self.names = Names(size, key)
        self._maps = {relation.name: self._map(relation, key) for relation in RELATIONS}
        self._values = Permutation(1 << 40, f"{key}/values")

    def kind(self, number: int) -> Kind:
        """The kind of an entity."""
        return next(kind for kind, numbers in self.ranges.items() if number in numbers)

    def object_of(self, relation: Relation, subject: int) -> int:
        """The one entity that ``subject`` has in ``relation``."""
        first, begin = self.ranges[relation.subject].start, self.ranges[relation.object].start
        order, fan = self._maps[relation.name]
        if relation.subject is relation.object:
            place = (order(subject - first) + 1) % order.size
            return begin + order.inverse(place)
        if relation.name == "capital" and (towns := self.subjects_of(RELATION["realm"], subject)):
            return towns[0]
        return begin + order(subject - first) // fan

    def subjects_of(self, relation: Relation, target: int) -> list[int]:
        """All entities whose object in ``relation`` is ``target``; at most a few, possibly none.

        Not for ``capital``, which only the realm knows.
        """
        subjects, begin = self.ranges[relation.subject], self.ranges[relation.object].start
        order, fan = self._maps[relation.name]
        place = target - begin
        if relation.subject is relation.object:
            return [subjects.start + order.inverse((order(place) - 1) % order.size)]
        found = (order.inverse(place * fan + slot) for slot in range(fan))
        return sorted(subjects.start + number for number in found if number < len(subjects))

    def value(self, attribute: Attribute, subject: int) -> int:
        """The number that ``subject`` has as ``attribute``."""
        return attribute.low + self._values(subject) % (attribute.high - attribute.low + 1)

    def page(self, number: int) -> Page:
        """The page of an entity.

        Raises:
            IndexError: There is no such entity.
        """
        if not 0 <= number < self.size:
            raise IndexError(f"page {number}: this world has pages 0 to {self.size - 1}")
        kind, title = self.kind(number), self.names.name(number)
        wording = self._values(number ^ (1 << 39)) if self.wordings > 1 else 0
        writer = _Writer(number, title, wording, "\n" if self.brief else " ")
        writer.add("{s} is a " + kind.value + ".", [])
        if self.brief:
            writer.add(ABOUT, [])
        for relation in OF_KIND[kind]:
            target = self.object_of(relation, number)
            writer.add(self._told(relation.told, writer), [(target, self.names.name(target))])
        attribute = ATTRIBUTE_OF[kind]
        value = str(self.value(attribute, number))
        writer.add(self._told(attribute.told, writer).replace("{o}", value), [])
        if not self.brief:
            self._add_lists(kind, number, writer)
        return writer.page()

    def _told(self, wordings: tuple[str, str], writer: _Writer) -> str:
        return brief(wordings) if self.brief else writer.pick(wordings)

    def _add_lists(self, kind: Kind, number: int, writer: _Writer) -> None:
        for relation in TOLD_OF[kind]:
            subjects = self.subjects_of(relation, number)
            if subjects and relation.listed:
                told = relation.listed.replace("{o}", "{x}").replace("{s}", "{o}").replace("{x}", "{s}")
                writer.add(told, [(subject, self.names.name(subject)) for subject in subjects])

    def _map(self, relation: Relation, key: str) -> tuple[Permutation, int]:
        """A shuffle of slots, and how many slots each object has."""
        subjects, objects = len(self.ranges[relation.subject]), len(self.ranges[relation.object])
        fan = 1 if relation.subject is relation.object else -(-subjects // objects)
        return Permutation(fan * objects, f"{key}/{relation.name}"), fan


class _Writer:
    """Puts sentences together and notes where links stand."""

    def __init__(self, number: int, title: str, wording: int, joint: str) -> None:
        self._number, self._title, self._wording, self._joint = number, title, wording, joint
        self._text = ""
        self._links: list[Link] = []

    def pick(self, wordings: tuple[str, str]) -> str:
        """The next choice of words."""
        self._wording, choice = divmod(self._wording, 2)
        return wordings[choice]

    def add(self, sentence: str, others: list[tuple[int, str]]) -> None:
        """Add a sentence with ``{s}`` for the title and ``{o}`` for the others."""
        before, mark, after = sentence.replace("{s}", self._title).partition("{o}")
        self._text += self._joint + before if self._text else before
        for place, (target, name) in enumerate(others if mark else []):
            if place:
                self._text += " and " if place == len(others) - 1 else ", "
            self._links.append(Link(len(self._text), len(self._text) + len(name), target))
            self._text += name
        self._text += after

    def page(self) -> Page:
        return Page(self._number, self._title, self._text, tuple(self._links))
