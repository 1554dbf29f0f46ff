"""Read what the generated encyclopaedia's own sentences say: the questions by depth, and the facts on its pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from afm.datasets.encyclopaedia.relations import ABOUT, ATTRIBUTES, RELATIONS, brief

_TOLD: Mapping[str, tuple[str, str]] = {fact.name: fact.told for fact in (*RELATIONS, *ATTRIBUTES)}
_ONE = "|".join(map(re.escape, sorted(_TOLD, key=len, reverse=True)))
_CHAIN = re.compile(rf"What is the ((?:{_ONE})(?: of the (?:{_ONE}))*) of (\w+ \w+)\?")


@dataclass(frozen=True, slots=True)
class Chain:
    """A question by depth.

    Attributes:
        start: The entity that it names.
        asks: The facts to look up, the first one of ``start``, each next one of what was found before.
    """

    start: str
    asks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence of a page, and the name or number that it gives."""

    sentence: str
    gives: str


def read_chain(question: str) -> Chain | None:
    """The chain that a question asks for; ``None`` when it is none."""
    found = _CHAIN.fullmatch(question.strip())
    if found is None:
        return None
    return Chain(found[2], tuple(reversed(found[1].split(" of the "))))


def find_fact(text: str, asks: str, name: str) -> Fact | None:
    """The sentence in ``text`` that tells the fact ``asks`` of the entity ``name``, in any of its wordings."""
    wordings: tuple[str, ...] = _TOLD.get(asks, ())
    if wordings and ABOUT.replace("{s}", name) in text:
        wordings = (*wordings, brief(_TOLD[asks]))
    for wording in wordings:
        before, _, after = wording.replace("{s}", name).partition("{o}")
        found = re.search(rf"{re.escape(before)}(\w+(?: \w+)??){re.escape(after)}", text)
        if found is not None:
            return Fact(found[0], found[1])
    return None
