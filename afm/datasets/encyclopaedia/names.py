"""Unique names of two words from two closed lists, which are no longer than a world needs."""

from __future__ import annotations

import math
from functools import cache

from afm.datasets.encyclopaedia.permutation import Permutation

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_ENDINGS = ("ford", "wick", "mere", "holt", "gate", "stead", "brook", "field", "moor", "dale")
_SPARE = 1.25
"""Names for each entity; some must stay free."""
_WORDS = (len(_CONSONANTS) * len(_VOWELS)) ** 2
"""Words in each list at most."""


class Names:
    """The names of ``count`` entities; both directions take constant time.

    Attributes:
        firsts, seconds: The two closed lists; no word is in both. The same words for every seed.
    """

    def __init__(self, count: int, key: str) -> None:
        self.count = count
        side = math.isqrt(math.ceil(_SPARE * count) - 1) + 1
        self.firsts = _first_words()[:side]
        self.seconds = _second_words()[:side]
        self._order = Permutation(side * side, f"{key}/names")
        self._first_place = {word: place for place, word in enumerate(self.firsts)}
        self._second_place = {word: place for place, word in enumerate(self.seconds)}

    def name(self, number: int) -> str:
        """The name of entity ``number``, e.g. ``Belo Karford``."""
        first, second = divmod(self._order(number), len(self.seconds))
        return f"{self.firsts[first]} {self.seconds[second]}"

    def number(self, name: str) -> int | None:
        """The entity of that name."""
        first, _, second = name.partition(" ")
        if first not in self._first_place or second not in self._second_place:
            return None
        code = self._first_place[first] * len(self.seconds) + self._second_place[second]
        number = self._order.inverse(code)
        return number if number < self.count else None


@cache
def _first_words() -> tuple[str, ...]:
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    return _shuffled([(one + two).capitalize() for one in syllables for two in syllables], "first")


@cache
def _second_words() -> tuple[str, ...]:
    stems = [a + vowel + z for a in _CONSONANTS for vowel in _VOWELS for z in _CONSONANTS]
    words = [(stem + ending).capitalize() for stem in stems for ending in _ENDINGS]
    return _shuffled(words, "second")[:_WORDS]


def _shuffled(words: list[str], key: str) -> tuple[str, ...]:
    order = Permutation(len(words), key)
    return tuple(words[order(place)] for place in range(len(words)))
