"""The closed encyclopaedia: computes any entity, fact or page from its number, in constant time and memory."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache

from afm.datasets.encyclopaedia.relations import (
    ABOUT,
    ATTRIBUTE_OF,
    LISTED_ON,
    OF_KIND,
    RELATION,
    RELATIONS,
    SHARES,
    Attribute,
    EntityKind,
    Relation,
    WorldFact,
)
from afm.errors import ConfigError

_ROUNDS = 4
_MASK = (1 << 64) - 1


class Permutation:
    """A pseudo-random bijection on ``range(size)``.

    A Feistel network over mixed radix (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). A number is a
    pair of digits, and each round adds a hash of one digit to the other. Results outside the domain are permuted again.

    Args:
        size: At least 1.
        key: Different keys give unrelated shuffles.
    """

    __slots__ = ("_keys", "_left", "_right", "size")

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._left = max(1, math.isqrt(size - 1) + 1)
        self._right = -(-size // self._left)
        digest = hashlib.sha256(key.encode()).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "big") for i in range(_ROUNDS)]

    def __call__(self, number: int) -> int:
        """Return the image of ``number``."""
        while True:
            left, right = divmod(number, self._right)
            for place, key in enumerate(self._keys):
                if place % 2:
                    right = (right + _mixed(left ^ key)) % self._right
                else:
                    left = (left + _mixed(right ^ key)) % self._left
            number = left * self._right + right
            if number < self.size:
                return number

    def inverse(self, number: int) -> int:
        """Return the preimage of ``number``."""
        while True:
            left, right = divmod(number, self._right)
            for place in range(_ROUNDS - 1, -1, -1):
                key = self._keys[place]
                if place % 2:
                    right = (right - _mixed(left ^ key)) % self._right
                else:
                    left = (left - _mixed(right ^ key)) % self._left
            number = left * self._right + right
            if number < self.size:
                return number


def _mixed(value: int) -> int:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_ENDINGS = ("ford", "wick", "mere", "holt", "gate", "stead", "brook", "field", "moor", "dale")
_SPARE = 1.25
"""Possible names per entity. Some must stay free."""
_WORDS = (len(_CONSONANTS) * len(_VOWELS)) ** 2
"""Maximum number of words in each list."""


class Names:
    """The names of ``count`` entities, made of two closed lists of words. Look-ups in both directions are constant time."""

    def __init__(self, count: int, key: str) -> None:
        self.count = count
        side = math.isqrt(math.ceil(_SPARE * count) - 1) + 1
        self.firsts = _first_words()[:side]
        self.seconds = _second_words()[:side]
        self._order = Permutation(side * side, f"{key}/names")
        self._first_place = {word: place for place, word in enumerate(self.firsts)}
        self._second_place = {word: place for place, word in enumerate(self.seconds)}

    def name(self, number: int) -> str:
        """Return the name of entity ``number``, for example ``Belo Karford``."""
        first, second = divmod(self._order(number), len(self.seconds))
        return f"{self.firsts[first]} {self.seconds[second]}"

    def number(self, name: str) -> int | None:
        """Return the number of the entity with this name, if there is one."""
        first, _, second = name.partition(" ")
        if first not in self._first_place or second not in self._second_place:
            return None
        code = self._first_place[first] * len(self.seconds) + self._second_place[second]
        number = self._order.inverse(code)
        return number if number < self.count else None


@cache
def _first_words() -> tuple[str, ...]:
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    return _shuffled([(first + second).capitalize() for first in syllables for second in syllables], "first")


@cache
def _second_words() -> tuple[str, ...]:
    stems = [a + vowel + z for a in _CONSONANTS for vowel in _VOWELS for z in _CONSONANTS]
    words = [(stem + ending).capitalize() for stem in stems for ending in _ENDINGS]
    return _shuffled(words, "second")[:_WORDS]


def _shuffled(words: list[str], key: str) -> tuple[str, ...]:
    order = Permutation(len(words), key)
    return tuple(words[order(place)] for place in range(len(words)))


LEAST, MOST = 40, 16_000_000
"""Number of entities of the smallest and the largest world."""


@dataclass(frozen=True, slots=True)
class Link:
    """The name of another entity in a page's text, by character position."""

    start: int
    end: int
    target: int


@dataclass(frozen=True, slots=True)
class WikiPage:
    """One entity's page.

    Attributes:
        number: The entity. The passage's id in the corpus is the same number as text.
        links: Links in the order of the text. They never overlap.
    """

    number: int
    title: str
    text: str
    links: tuple[Link, ...]

    @property
    def contents(self) -> str:
        """Title in quotes, a line feed, and the text, as in Search-R1's passages."""
        return f'"{self.title}"\n{self.text}'


class Encyclopaedia:
    """A world of ``size`` entities with one page each, fully determined by its arguments.

    Args:
        size: Number of entities and pages.
        seed: Seed of names, facts and wording.
        wordings: 1 states every fact in the same words, 2 varies.
        brief: Whether pages are tables with one fact per line, like ``Mayor Ba Ka.``, and the entity only at the top.

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
        counts[EntityKind.PERSON] = size - sum(counts.values())
        self.ranges: dict[EntityKind, range] = {}
        begin = 0
        for kind in EntityKind:
            self.ranges[kind] = range(begin, begin + counts[kind])
            begin += counts[kind]
        self.names = Names(size, key)
        self._maps = {relation.name: self._map(relation, key) for relation in RELATIONS}
        self._values = Permutation(1 << 40, f"{key}/values")

    def kind(self, number: int) -> EntityKind:
        """Return the kind of an entity."""
        return next(kind for kind, numbers in self.ranges.items() if number in numbers)

    def object_of(self, relation: Relation, subject: int) -> int:
        """Return the one object of ``subject`` in ``relation``."""
        first, begin = self.ranges[relation.subject].start, self.ranges[relation.object].start
        order, fan = self._maps[relation.name]
        if relation.subject is relation.object:
            place = (order(subject - first) + 1) % order.size
            return begin + order.inverse(place)
        if relation.name == "capital" and (towns := self.subjects_of(RELATION["realm"], subject)):
            return towns[0]
        return begin + order(subject - first) // fan

    def subjects_of(self, relation: Relation, target: int) -> list[int]:
        """Return the few entities, possibly zero, whose object in ``relation`` is ``target``.

        Not available for ``capital``, which only the realm states.
        """
        subjects, begin = self.ranges[relation.subject], self.ranges[relation.object].start
        order, fan = self._maps[relation.name]
        place = target - begin
        if relation.subject is relation.object:
            return [subjects.start + order.inverse((order(place) - 1) % order.size)]
        numbers = (order.inverse(place * fan + slot) for slot in range(fan))
        return sorted(subjects.start + number for number in numbers if number < len(subjects))

    def value(self, attribute: Attribute, subject: int) -> int:
        """Return the number of ``subject`` for ``attribute``."""
        return attribute.low + self._values(subject) % (attribute.high - attribute.low + 1)

    def page(self, number: int) -> WikiPage:
        """Return the page of an entity, or raise ``IndexError`` for an unknown number."""
        if not 0 <= number < self.size:
            raise IndexError(f"page {number}: this world has pages 0 to {self.size - 1}")
        kind, title = self.kind(number), self.names.name(number)
        wording = self._values(number ^ (1 << 39)) if self.wordings > 1 else 0
        writer = _PageText(number, title, wording, "\n" if self.brief else " ")
        writer.add("{s} is a " + kind.value + ".", [])
        if self.brief:
            writer.add(ABOUT, [])
        for relation in OF_KIND[kind]:
            target = self.object_of(relation, number)
            writer.add(self._sentence(relation, writer), [(target, self.names.name(target))])
        attribute = ATTRIBUTE_OF[kind]
        value = str(self.value(attribute, number))
        writer.add(self._sentence(attribute, writer).replace("{o}", value), [])
        if not self.brief:
            self._add_lists(kind, number, writer)
        return writer.page()

    def _sentence(self, fact: WorldFact, writer: _PageText) -> str:
        return fact.brief if self.brief else writer.pick(fact.wordings)

    def _add_lists(self, kind: EntityKind, number: int, writer: _PageText) -> None:
        for relation in LISTED_ON[kind]:
            subjects = self.subjects_of(relation, number)
            if subjects and relation.listed:
                swapped = relation.listed.replace("{o}", "{x}").replace("{s}", "{o}").replace("{x}", "{s}")
                writer.add(swapped, [(subject, self.names.name(subject)) for subject in subjects])

    def _map(self, relation: Relation, key: str) -> tuple[Permutation, int]:
        """Return a permutation of slots, and the number of slots per object."""
        subjects, objects = len(self.ranges[relation.subject]), len(self.ranges[relation.object])
        fan = 1 if relation.subject is relation.object else -(-subjects // objects)
        return Permutation(fan * objects, f"{key}/{relation.name}"), fan


class _PageText:
    """Joins sentences and records the positions of links."""

    def __init__(self, number: int, title: str, wording: int, joint: str) -> None:
        self._number, self._title, self._wording, self._joint = number, title, wording, joint
        self._text = ""
        self._links: list[Link] = []

    def pick(self, wordings: tuple[str, str]) -> str:
        """Choose the next wording."""
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

    def page(self) -> WikiPage:
        return WikiPage(self._number, self._title, self._text, tuple(self._links))
