"""Larger questions from a world's graph: by depth (a longer chain) and by width (combined sub-questions).

Every question has a :class:`Proof` that it needs as many pages as it claims. Depth and width follow AFM's query
expansion (arXiv 2508.13167).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from itertools import combinations
from typing import Any

from afm.datasets.encyclopaedia.questions import (
    DATA_SOURCE,
    Hop,
    Shape,
    WorldQuestion,
    chain,
    chain_words,
    number_hop,
    path_info,
    walk,
)
from afm.datasets.encyclopaedia.relations import (
    LISTED_ON,
    RELATION,
    EntityKind,
    find_fact,
)
from afm.datasets.encyclopaedia.world import Encyclopaedia
from afm.datasets.mini_world import WorldSplit
from afm.datasets.schema import Task
from afm.errors import ConfigError

_MAX_MISSES = 20_000
_BRANCH_MISSES = 100


class Growth(StrEnum):
    """The direction in which a question grows."""

    DEPTH = "depth"
    """A chain of facts, each of which needs the one before."""
    WIDTH = "width"
    """Parallel chains whose numbers are combined."""


@dataclass(frozen=True, slots=True)
class _Combination:
    """A way to combine the numbers of the branches."""

    name: str
    words: str
    result: Callable[[Sequence[int]], int]
    pairs_only: bool = False
    compares: bool = False
    """Whether the numbers must be of one kind, because a length and a year differ without a look-up."""


_COMBINATIONS = (
    _Combination(
        "difference", "What is the difference between {branches}?", lambda n: abs(n[0] - n[1]), True
    ),
    _Combination("sum", "What is the sum of {branches}?", sum),
    _Combination("largest", "What is the largest of these numbers: {branches}?", max, compares=True),
    _Combination("smallest", "What is the smallest of these numbers: {branches}?", min, compares=True),
)


def expand(
    world: Encyclopaedia,
    split: WorldSplit,
    count: int,
    *,
    seed: int,
    growth: Growth,
    depths: Sequence[int],
    widths: Sequence[int] = (1,),
) -> Iterator[Task]:
    """Stream ``count`` distinct tasks. The same arguments give the same tasks.

    Args:
        depths: Numbers of facts in a chain, distributed evenly.
        widths: Numbers of chains in a question by width, distributed evenly.

    Raises:
        ConfigError: A number is too small, or the world holds too few questions with a proof.
    """
    least = 2 if growth is Growth.WIDTH else 1
    widths = widths if growth is Growth.WIDTH else (1,)
    if not depths or min(depths) < 1 or not widths or min(widths) < least:
        raise ConfigError(
            f"depths {list(depths)}, widths {list(widths)}: expected depths from 1 and widths from {least}"
        )
    sizes = [(depth, width) for depth in depths for width in widths]
    rng = random.Random(f"{DATA_SOURCE}/{world.size}/{world.seed}/{split}/{growth}/{seed}")
    seen: set[str] = set()
    for number in range(count):
        depth, width = sizes[number % len(sizes)]
        question, proof = _proved(rng, world, split, growth, depth, width, seen)
        yield Task(
            id=f"{DATA_SOURCE}-{growth}-{depth}x{width}-{world.size}-{world.seed}-{split}-{seed}-{number:06d}-{_digest(question)}",
            question=question.text,
            ground_truth=question.answer,
            data_source=DATA_SOURCE,
            extra_info=_info(world, question, proof, growth, depth, width),
        )


def _digest(question: WorldQuestion) -> str:
    """Return a digest of a question, because sets of one seed share numbers, depths and widths."""
    return blake2b(question.text.encode(), digest_size=3).hexdigest()


def _info(
    world: Encyclopaedia, question: WorldQuestion, proof: Proof, growth: Growth, depth: int, width: int
) -> dict[str, Any]:
    return {
        "shape": growth.value,
        "hops": proof.reads,
        "depth": depth,
        "width": width,
        "path": path_info(world, question.path),
        "proof": {"reads": proof.reads, "pages": [str(page) for page in proof.pages], "only": proof.only},
    }


def _proved(
    rng: random.Random,
    world: Encyclopaedia,
    split: WorldSplit,
    growth: Growth,
    depth: int,
    width: int,
    seen: set[str],
) -> tuple[WorldQuestion, Proof]:
    """Return a new question of the split of which every fact needs its own page."""
    deep = growth is Growth.DEPTH
    ways = [way for way in _COMBINATIONS if width == 2 or not way.pairs_only]
    way = None if deep else rng.choice(ways)
    for _ in range(_MAX_MISSES):
        question = chain(rng, world, depth) if way is None else _wide(rng, world, depth, width, way)
        if question is None or question.text in seen or question.split is not split:
            continue
        proof = prove(world, question.path, question.answer)
        if proof.reads == len(question.path) and proof.only and not (deep and proof.early):
            seen.add(question.text)
            return question, proof
    raise ConfigError(
        f"a world of {world.size:,} pages ran out of questions by {growth} (depth {depth}, width {width}) of split "
        f"{split.value!r} after {len(seen):,}; ask for fewer or smaller ones, or for a larger world"
    )


def _wide(
    rng: random.Random, world: Encyclopaedia, depth: int, width: int, way: _Combination
) -> WorldQuestion | None:
    kind = rng.choice(tuple(EntityKind)) if way.compares else None
    taken: set[int] = set()
    branches: list[tuple[int, list[Hop]]] = []
    for _ in range(width):
        branch = _branch(rng, world, depth, kind, taken)
        if branch is None:
            return None
        branches.append(branch)
        taken |= {hop.page for hop in branch[1]}
    rng.shuffle(branches)  # later branches were drawn from the pages that earlier ones left
    numbers = [int(own[-1].gives) for _, own in branches]
    if len(set(numbers)) < len(numbers):
        return None
    chains = [f"the {chain_words(own)} {world.names.name(start)}" for start, own in branches]
    text = way.words.format(branches=f"{', '.join(chains[:-1])} and {chains[-1]}")
    path = tuple(hop for _, own in branches for hop in own)
    named = tuple(start for start, _ in branches)
    return WorldQuestion(Shape.COMPARISON, text, str(way.result(numbers)), path, named)


def _branch(
    rng: random.Random, world: Encyclopaedia, depth: int, kind: EntityKind | None, taken: set[int]
) -> tuple[int, list[Hop]] | None:
    """Return an entity and a chain from it to a number on a page of ``kind``, without the pages ``taken``."""
    for _ in range(_BRANCH_MISSES):
        first = kind if kind is not None and depth == 1 else rng.choice(tuple(EntityKind))
        start = rng.choice(world.ranges[first])
        steps = walk(rng, world, start, depth - 1, taken)
        if steps is None:
            continue
        path, end = [*steps[0], number_hop(world, steps[1])], steps[1]
        pages = {hop.page for hop in path}
        if len(pages) == len(path) and not pages & taken and kind in (None, world.kind(end)):
            return start, path
    return None


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof about a question by exhaustive search.

    A fact can be on several pages: its subject's page, and a list on its object's page. A reader who may open any page
    must read pages that together state every fact of the question. All sets of these pages are tried, the smaller ones
    first.

    Attributes:
        reads: Number of pages that every reader must read.
        pages: A smallest set of pages that states every fact.
        only: Whether it is the only set of its size, so that each of its pages is needed.
        early: Whether the answer is on a page before the last fact's, where it could be guessed. It applies only to
            chains. Of parallel chains, any may hold the answer.
    """

    reads: int
    pages: tuple[int, ...]
    only: bool
    early: bool


def prove(world: Encyclopaedia, path: Sequence[Hop], answer: str) -> Proof:
    """Find the least number of pages that state all facts of ``path``, by trying all sets of pages that state any."""
    places = [pages_of(world, hop) for hop in path]
    last = path[-1].page
    early = any(answer in world.page(page).contents for page in {hop.page for hop in path} - {last})
    for size in range(1, len(path) + 1):
        if sets := least_reads(places, size):
            return Proof(size, sets[0], len(sets) == 1, early)
    raise ValueError(f"no page states a fact of {path}")


def least_reads(places: Sequence[frozenset[int]], size: int) -> list[tuple[int, ...]]:
    """Return all sets of ``size`` pages that contain at least one of each fact's ``places``."""
    pages = sorted(frozenset().union(*places))
    return [chosen for chosen in combinations(pages, size) if all(place & set(chosen) for place in places)]


def pages_of(world: Encyclopaedia, hop: Hop) -> frozenset[int]:
    """Return every page that states a fact, from the text of the pages."""
    name = world.names.name(hop.page)
    pages = set()
    fact = find_fact(world.page(hop.page).text, hop.asks, name)
    if fact is not None and fact.gives == hop.gives:
        pages.add(hop.page)
    relation, target = RELATION.get(hop.asks), world.names.number(hop.gives)
    if relation is None or target is None or relation not in LISTED_ON[world.kind(target)]:
        return frozenset(pages)
    links = world.page(target).links
    if any(link.target == hop.page for link in links) and target == world.object_of(relation, hop.page):
        pages.add(target)
    return frozenset(pages)
