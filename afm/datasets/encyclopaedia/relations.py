"""What an encyclopaedia tells about its entities: kinds, relations between them, attributes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Kinds of entities, in the order of their numbers."""

    REALM = "realm"
    RIVER = "river"
    TOWN = "town"
    GUILD = "guild"
    BOOK = "book"
    PERSON = "person"


SHARES = {Kind.REALM: 3, Kind.RIVER: 5, Kind.TOWN: 20, Kind.GUILD: 10, Kind.BOOK: 15}
"""Of 100 entities; the rest are persons."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Every entity of kind ``subject`` has exactly one ``object`` in this relation.

    Attributes:
        name: As the noun in ``the {name} of X``.
        told: The sentence on the subject's page, with ``{s}`` and ``{o}``; the second is another wording.
        listed: The sentence on the object's page, with ``{o}`` and the subjects as ``{s}``; ``None``: not told there.
    """

    name: str
    subject: Kind
    object: Kind
    told: tuple[str, str]
    listed: str | None = None


@dataclass(frozen=True, slots=True)
class Attribute:
    """A number that every entity of kind ``subject`` has, from ``low`` to ``high``.

    Attributes:
        more, less: How the one with the greater and the smaller number is asked for: ``was born later``.
    """

    name: str
    subject: Kind
    low: int
    high: int
    told: tuple[str, str]
    less: str
    more: str


RELATIONS = (
    Relation("capital", Kind.REALM, Kind.TOWN, ("The capital of {s} is {o}.", "{s} is ruled from {o}.")),
    Relation("ruler", Kind.REALM, Kind.PERSON, ("The ruler of {s} is {o}.", "{s} is ruled by {o}.")),
    Relation("mouth", Kind.RIVER, Kind.REALM, ("The mouth of {s} is in {o}.", "{s} ends in {o}.")),
    Relation(
        "realm",
        Kind.TOWN,
        Kind.REALM,
        ("The realm of {s} is {o}.", "{s} belongs to the realm {o}."),
        "Towns of {o} include {s}.",
    ),
    Relation(
        "river",
        Kind.TOWN,
        Kind.RIVER,
        ("The river of {s} is {o}.", "{s} lies on the river {o}."),
        "Towns on {o} include {s}.",
    ),
    Relation("mayor", Kind.TOWN, Kind.PERSON, ("The mayor of {s} is {o}.", "{s} has {o} as its mayor.")),
    Relation("seat", Kind.GUILD, Kind.TOWN, ("The seat of {s} is {o}.", "{s} has its seat in {o}.")),
    Relation("founder", Kind.GUILD, Kind.PERSON, ("The founder of {s} is {o}.", "{s} was founded by {o}.")),
    Relation("author", Kind.BOOK, Kind.PERSON, ("The author of {s} is {o}.", "{s} was written by {o}.")),
    Relation(
        "publisher", Kind.BOOK, Kind.GUILD, ("The publisher of {s} is {o}.", "{s} was published by {o}.")
    ),
    Relation(
        "birthplace",
        Kind.PERSON,
        Kind.TOWN,
        ("The birthplace of {s} is {o}.", "{s} was born in {o}."),
        "People born in {o} include {s}.",
    ),
    Relation(
        "guild",
        Kind.PERSON,
        Kind.GUILD,
        ("The guild of {s} is {o}.", "{s} works for the guild {o}."),
        "Members of {o} include {s}.",
    ),
    Relation("teacher", Kind.PERSON, Kind.PERSON, ("The teacher of {s} is {o}.", "{s} was taught by {o}.")),
    Relation("friend", Kind.PERSON, Kind.PERSON, ("The friend of {s} is {o}.", "{s} has a friend, {o}.")),
)

ATTRIBUTES = (
    Attribute(
        "area",
        Kind.REALM,
        100,
        9_999,
        ("The area of {s} is {o} square miles.", "{s} covers {o} square miles."),
        "is smaller in area",
        "is larger in area",
    ),
    Attribute(
        "length",
        Kind.RIVER,
        20,
        999,
        ("The length of {s} is {o} miles.", "{s} runs over {o} miles."),
        "is shorter",
        "is longer",
    ),
    Attribute(
        "founding year",
        Kind.TOWN,
        1000,
        1899,
        ("The founding year of {s} is {o}.", "{s} was founded in {o}."),
        "was founded earlier",
        "was founded later",
    ),
    Attribute(
        "opening year",
        Kind.GUILD,
        1500,
        1999,
        ("The opening year of {s} is {o}.", "{s} opened in {o}."),
        "opened earlier",
        "opened later",
    ),
    Attribute(
        "publication year",
        Kind.BOOK,
        1600,
        1999,
        ("The publication year of {s} is {o}.", "{s} appeared in {o}."),
        "appeared earlier",
        "appeared later",
    ),
    Attribute(
        "birth year",
        Kind.PERSON,
        1700,
        1999,
        ("The birth year of {s} is {o}.", "{s} was born in the year {o}."),
        "was born earlier",
        "was born later",
    ),
)

ABOUT = "Facts about {s}:"
"""On brief pages: whose facts these are. It repeats the title, so that a search prefers the page to those that name it."""


def brief(told: tuple[str, str]) -> str:
    """A fact's line on brief pages: ``Mayor {o}.``, the noun directly before what it gives."""
    noun, _, given = told[0].removeprefix("The ").partition(" of {s} is ")
    return f"{noun.capitalize()} {given.removeprefix('in ')}"


OF_KIND = {kind: tuple(r for r in RELATIONS if r.subject is kind) for kind in Kind}
TOLD_OF = {kind: tuple(r for r in RELATIONS if r.object is kind and r.listed) for kind in Kind}
ATTRIBUTE_OF = {attribute.subject: attribute for attribute in ATTRIBUTES}
RELATION = {relation.name: relation for relation in RELATIONS}
