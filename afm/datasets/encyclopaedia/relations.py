"""The encyclopaedia's facts: kinds of entities, relations and attributes, the sentences that state them, and how these are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
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
"""Of 100 entities; the rest are persons."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Every entity of kind ``subject`` has exactly one ``object`` in this relation; ``name`` as in ``the {name} of X``.

    Attributes:
        wordings: Two sentences for the subject's page, with ``{s}`` and ``{o}``.
        listed: The sentence on the object's page, with ``{o}`` and the subjects as ``{s}``; ``None``: not stated there.
    """

    name: str
    subject: EntityKind
    object: EntityKind
    wordings: tuple[str, str]
    listed: str | None = None


@dataclass(frozen=True, slots=True)
class Attribute:
    """A number from ``low`` to ``high``; ``less`` and ``more`` ask for an extreme: ``was born later``."""

    name: str
    subject: EntityKind
    low: int
    high: int
    wordings: tuple[str, str]
    less: str
    more: str


RELATIONS = (
    Relation(
        "capital", EntityKind.REALM, EntityKind.TOWN, ("The capital of {s} is {o}.", "{s} is ruled from {o}.")
    ),
    Relation(
        "ruler", EntityKind.REALM, EntityKind.PERSON, ("The ruler of {s} is {o}.", "{s} is ruled by {o}.")
    ),
    Relation(
        "mouth", EntityKind.RIVER, EntityKind.REALM, ("The mouth of {s} is in {o}.", "{s} ends in {o}.")
    ),
    Relation(
        "realm",
        EntityKind.TOWN,
        EntityKind.REALM,
        ("The realm of {s} is {o}.", "{s} belongs to the realm {o}."),
        "Towns of {o} include {s}.",
    ),
    Relation(
        "river",
        EntityKind.TOWN,
        EntityKind.RIVER,
        ("The river of {s} is {o}.", "{s} lies on the river {o}."),
        "Towns on {o} include {s}.",
    ),
    Relation(
        "mayor", EntityKind.TOWN, EntityKind.PERSON, ("The mayor of {s} is {o}.", "{s} has {o} as its mayor.")
    ),
    Relation(
        "seat", EntityKind.GUILD, EntityKind.TOWN, ("The seat of {s} is {o}.", "{s} has its seat in {o}.")
    ),
    Relation(
        "founder",
        EntityKind.GUILD,
        EntityKind.PERSON,
        ("The founder of {s} is {o}.", "{s} was founded by {o}."),
    ),
    Relation(
        "author", EntityKind.BOOK, EntityKind.PERSON, ("The author of {s} is {o}.", "{s} was written by {o}.")
    ),
    Relation(
        "publisher",
        EntityKind.BOOK,
        EntityKind.GUILD,
        ("The publisher of {s} is {o}.", "{s} was published by {o}."),
    ),
    Relation(
        "birthplace",
        EntityKind.PERSON,
        EntityKind.TOWN,
        ("The birthplace of {s} is {o}.", "{s} was born in {o}."),
        "People born in {o} include {s}.",
    ),
    Relation(
        "guild",
        EntityKind.PERSON,
        EntityKind.GUILD,
        ("The guild of {s} is {o}.", "{s} works for the guild {o}."),
        "Members of {o} include {s}.",
    ),
    Relation(
        "teacher",
        EntityKind.PERSON,
        EntityKind.PERSON,
        ("The teacher of {s} is {o}.", "{s} was taught by {o}."),
    ),
    Relation(
        "friend",
        EntityKind.PERSON,
        EntityKind.PERSON,
        ("The friend of {s} is {o}.", "{s} has a friend, {o}."),
    ),
)

ATTRIBUTES = (
    Attribute(
        "area",
        EntityKind.REALM,
        100,
        9_999,
        ("The area of {s} is {o} square miles.", "{s} covers {o} square miles."),
        "is smaller in area",
        "is larger in area",
    ),
    Attribute(
        "length",
        EntityKind.RIVER,
        20,
        999,
        ("The length of {s} is {o} miles.", "{s} runs over {o} miles."),
        "is shorter",
        "is longer",
    ),
    Attribute(
        "founding year",
        EntityKind.TOWN,
        1000,
        1899,
        ("The founding year of {s} is {o}.", "{s} was founded in {o}."),
        "was founded earlier",
        "was founded later",
    ),
    Attribute(
        "opening year",
        EntityKind.GUILD,
        1500,
        1999,
        ("The opening year of {s} is {o}.", "{s} opened in {o}."),
        "opened earlier",
        "opened later",
    ),
    Attribute(
        "publication year",
        EntityKind.BOOK,
        1600,
        1999,
        ("The publication year of {s} is {o}.", "{s} appeared in {o}."),
        "appeared earlier",
        "appeared later",
    ),
    Attribute(
        "birth year",
        EntityKind.PERSON,
        1700,
        1999,
        ("The birth year of {s} is {o}.", "{s} was born in the year {o}."),
        "was born earlier",
        "was born later",
    ),
)

ABOUT = "Facts about {s}:"
"""On brief pages: whose facts these are. It repeats the title, so that a search prefers the page to those that name it."""


def brief(wordings: tuple[str, str]) -> str:
    """A fact's line on brief pages: ``Mayor {o}.``, the noun directly before what it gives."""
    noun, _, value = wordings[0].removeprefix("The ").partition(" of {s} is ")
    return f"{noun.capitalize()} {value.removeprefix('in ')}"


OF_KIND = {kind: tuple(r for r in RELATIONS if r.subject is kind) for kind in EntityKind}
LISTED_ON = {kind: tuple(r for r in RELATIONS if r.object is kind and r.listed) for kind in EntityKind}
ATTRIBUTE_OF = {attribute.subject: attribute for attribute in ATTRIBUTES}
RELATION = {relation.name: relation for relation in RELATIONS}


_WORDINGS = {fact.name: fact.wordings for fact in (*RELATIONS, *ATTRIBUTES)}
_FACT = "|".join(map(re.escape, sorted(_WORDINGS, key=len, reverse=True)))
_CHAIN = re.compile(rf"What is the ((?:{_FACT})(?: of the (?:{_FACT}))*) of (\w+ \w+)\?")


@dataclass(frozen=True, slots=True)
class Chain:
    """A question by depth.

    Attributes:
        start: The entity that it names.
        asks: The facts to look up: the first of ``start``, each next one of what the one before gave.
    """

    start: str
    asks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StatedFact:
    """A sentence of a page, and the name or number that it gives."""

    sentence: str
    gives: str


def read_chain(question: str) -> Chain | None:
    """The chain that a question asks for; ``None`` for any other text."""
    match = _CHAIN.fullmatch(question.strip())
    return match and Chain(match[2], tuple(reversed(match[1].split(" of the "))))


def find_fact(text: str, asks: str, name: str) -> StatedFact | None:
    """The sentence in ``text`` that states the fact ``asks`` of the entity ``name``, in any of its wordings."""
    wordings: tuple[str, ...] = _WORDINGS.get(asks, ())
    if wordings and ABOUT.replace("{s}", name) in text:
        wordings = (*wordings, brief(_WORDINGS[asks]))
    for wording in wordings:
        before, _, after = wording.replace("{s}", name).partition("{o}")
        match = re.search(rf"{re.escape(before)}(\w+(?: \w+)??){re.escape(after)}", text)
        if match is not None:
            return StatedFact(match[0], match[1])
    return None
