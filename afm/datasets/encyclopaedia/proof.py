"""How many pages a question needs at least, proved by exhaustion.

A fact can stand on more than one page: on its subject's, and in a list on its object's. A reader who may open any page, found
by whatever search, must have read pages that together state every fact of the question. :func:`least_reads` tries all
sets of such pages, the smaller ones first, so that no shorter way is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from afm.datasets.encyclopaedia.questions import Hop
from afm.datasets.encyclopaedia.reading import find_fact
from afm.datasets.encyclopaedia.relations import RELATION, TOLD_OF
from afm.datasets.encyclopaedia.world import Encyclopaedia


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved about a question.

    Attributes:
        reads: Pages that must be read, whatever the way.
        pages: A smallest set of pages that states every fact.
        only: Whether it is the only one of its size, so that each of its pages is needed.
        early: Whether the answer stands on one of the pages before the last fact's, where it could be guessed. It says
            something about chains alone: of chains side by side any may hold the answer.
    """

    reads: int
    pages: tuple[int, ...]
    only: bool
    early: bool


def prove(world: Encyclopaedia, path: Sequence[Hop], answer: str) -> Proof:
    """The least number of pages that state all facts of ``path``, by trying all sets of pages that state any."""
    places = [pages_of(world, hop) for hop in path]
    last = path[-1].page
    early = any(answer in world.page(page).contents for page in {hop.page for hop in path} - {last})
    for size in range(1, len(path) + 1):
        found = least_reads(places, size)
        if found:
            return Proof(size, found[0], len(found) == 1, early)
    raise ValueError(f"a fact of {path} stands on no page")


def least_reads(places: Sequence[frozenset[int]], size: int) -> list[tuple[int, ...]]:
    """All sets of ``size`` pages that hold at least one of each fact's ``places``."""
    pages = sorted(frozenset().union(*places))
    return [chosen for chosen in combinations(pages, size) if all(place & set(chosen) for place in places)]


def pages_of(world: Encyclopaedia, hop: Hop) -> frozenset[int]:
    """Every page that states a fact; read from the pages' own text."""
    name = world.names.name(hop.page)
    found = set()
    fact = find_fact(world.page(hop.page).text, hop.asks, name)
    if fact is not None and fact.gives == hop.gives:
        found.add(hop.page)
    relation, target = RELATION.get(hop.asks), world.names.number(hop.gives)
    if relation is None or target is None or relation not in TOLD_OF[world.kind(target)]:
        return frozenset(found)
    page = world.page(target)
    if any(link.target == hop.page for link in page.links) and target == world.object_of(relation, hop.page):
        found.add(target)
    return frozenset(found)
