"""The encyclopaedia's facts: entities, relations, attributes, and the sentences that state them, with their parser."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum


class EntityKind(StrEnum):
    """Kinds of entities, in the order of their numbers."""

    REALM = "realm"
    RIVER = "river"
    TOWN = "town"
    GUILD = "guild"
    BOOK = "book"
    PERSON = "person"


SHARES = {
    EntityKind.REALM: 3,
    EntityKind.RIVER: 5,
    EntityKind.TOWN: 20,
    EntityKind.GUILD: 10,
    EntityKind.BOOK: 15,
}
"""Entities of each kind per 100. The rest are persons."""


@dataclass(frozen=True, slots=True)
class WorldFact:
    """A fact of which every entity of kind ``subject`` has exactly one. ``name`` is used as in ``the {name} of X``.

    Attributes:
        variation: A second sentence for the subject's page, with ``{s}`` for the subject and ``{o}`` for the value.
        value: Form of the value in the plain sentence.
    """

    name: str
    subject: EntityKind
    variation: str
    value: str = field(default="{o}", kw_only=True)

    @property
    def wordings(self) -> tuple[str, str]:
        """The sentences that state the fact, with the plain one first."""
        return f"The {self.name} of {{s}} is {self.value}.", self.variation

    @property
    def brief(self) -> str:
        """The fact's line on brief pages: ``Mayor {o}.``, with the noun directly before the value."""
        return f"{self.name.capitalize()} {self.value.removeprefix('in ')}."


@dataclass(frozen=True, slots=True)
class Relation(WorldFact):
    """A fact whose value is an entity of kind ``object``.

    Attributes:
        listed: The sentence on the object's page, with ``{o}`` and the subjects as ``{s}``. ``None`` if not stated there.
    """

    object: EntityKind
    listed: str | None = None


@dataclass(frozen=True, slots=True)
class Attribute(WorldFact):
    """A number from ``low`` to ``high``. ``less`` and ``more`` ask for an extreme: ``was born later``."""

    low: int
    high: int
    less: str
    more: str


_K = EntityKind
RELATIONS = (
    Relation("capital", _K.REALM, "{s} is ruled from {o}.", _K.TOWN),
    Relation("ruler", _K.REALM, "{s} is ruled by {o}.", _K.PERSON),
    Relation("mouth", _K.RIVER, "{s} ends in {o}.", _K.REALM, value="in {o}"),
    Relation("realm", _K.TOWN, "{s} belongs to the realm {o}.", _K.REALM, "Towns of {o} include {s}."),
    Relation("river", _K.TOWN, "{s} lies on the river {o}.", _K.RIVER, "Towns on {o} include {s}."),
    Relation("mayor", _K.TOWN, "{s} has {o} as its mayor.", _K.PERSON),
    Relation("seat", _K.GUILD, "{s} has its seat in {o}.", _K.TOWN),
    Relation("founder", _K.GUILD, "{s} was founded by {o}.", _K.PERSON),
    Relation("author", _K.BOOK, "{s} was written by {o}.", _K.PERSON),
    Relation("publisher", _K.BOOK, "{s} was published by {o}.", _K.GUILD),
    Relation("birthplace", _K.PERSON, "{s} was born in {o}.", _K.TOWN, "People born in {o} include {s}."),
    Relation("guild", _K.PERSON, "{s} works for the guild {o}.", _K.GUILD, "Members of {o} include {s}."),
    Relation("teacher", _K.PERSON, "{s} was taught by {o}.", _K.PERSON),
    Relation("friend", _K.PERSON, "{s} has a friend, {o}.", _K.PERSON),
)

ATTRIBUTES = (
    Attribute(
        "area",
        _K.REALM,
        "{s} covers {o} square miles.",
        100,
        9_999,
        "is smaller in area",
        "is larger in area",
        value="{o} square miles",
    ),
    Attribute(
        "length", _K.RIVER, "{s} runs over {o} miles.", 20, 999, "is shorter", "is longer", value="{o} miles"
    ),
    Attribute(
        "founding year",
        _K.TOWN,
        "{s} was founded in {o}.",
        1000,
        1899,
        "was founded earlier",
        "was founded later",
    ),
    Attribute("opening year", _K.GUILD, "{s} opened in {o}.", 1500, 1999, "opened earlier", "opened later"),
    Attribute(
        "publication year", _K.BOOK, "{s} appeared in {o}.", 1600, 1999, "appeared earlier", "appeared later"
    ),
    Attribute(
        "birth year",
        _K.PERSON,
        "{s} was born in the year {o}.",
        1700,
        1999,
        "was born earlier",
        "was born later",
    ),
)

ABOUT = "Facts about {s}:"
"""First line of brief pages. It repeats the title, so that a search prefers the page to those that name it."""


OF_KIND = {kind: tuple(r for r in RELATIONS if r.subject is kind) for kind in EntityKind}
LISTED_ON = {kind: tuple(r for r in RELATIONS if r.object is kind and r.listed) for kind in EntityKind}
ATTRIBUTE_OF = {attribute.subject: attribute for attribute in ATTRIBUTES}
RELATION = {relation.name: relation for relation in RELATIONS}


_FACTS: dict[str, WorldFact] = {fact.name: fact for fact in (*RELATIONS, *ATTRIBUTES)}
_FACT = "|".join(map(re.escape, sorted(_FACTS, key=len, reverse=True)))
_CHAIN = re.compile(rf"What is the ((?:{_FACT})(?: of the (?:{_FACT}))*) of (\w+ \w+)\?")


@dataclass(frozen=True, slots=True)
class Chain:
    """A question by depth.

    Attributes:
        start: The entity that the question names.
        asks: The facts to look up: the first of ``start``, each next one of the previous fact's value.
    """

    start: str
    asks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StatedFact:
    """A sentence of a page, and the name or number that it states."""

    sentence: str
    gives: str


def read_chain(question: str) -> Chain | None:
    """Parse the chain that a question asks for. Returns ``None`` for any other text."""
    match = _CHAIN.fullmatch(question.strip())
    return match and Chain(match[2], tuple(reversed(match[1].split(" of the "))))


def find_fact(text: str, asks: str, name: str) -> StatedFact | None:
    """Find the sentence in ``text`` that states the fact ``asks`` of the entity ``name``, in any wording."""
    fact = _FACTS.get(asks)
    if fact is None:
        return None
    brief = (fact.brief,) if ABOUT.replace("{s}", name) in text else ()
    for wording in (*fact.wordings, *brief):
        before, _, after = wording.replace("{s}", name).partition("{o}")
        match = re.search(rf"{re.escape(before)}(\w+(?: \w+)??){re.escape(after)}", text)
        if match is not None:
            return StatedFact(match[0], match[1])
    return None
