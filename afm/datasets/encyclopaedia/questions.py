"""Multi-hop questions about a world: chains (depth), comparisons and intersections (width).

A hop is a page that must be read. A hash of the entities that a question names decides its split, so questions of
different splits never name the same entities, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from afm.datasets.encyclopaedia.relations import ATTRIBUTE_OF, OF_KIND, RELATION, EntityKind, Relation
from afm.datasets.encyclopaedia.world import Encyclopaedia
from afm.datasets.mini_world import WorldSplit, split_of
from afm.datasets.schema import Task
from afm.errors import ConfigError

DATA_SOURCE = "mini_wiki"
HOPS = (1, 2, 3, 4)

_MAX_MISSES = 5_000


class Shape(StrEnum):
    """The structure of a question's facts."""

    CHAIN = "chain"
    COMPARISON = "comparison"
    INTERSECTION = "intersection"


SHAPES = (Shape.CHAIN,)
"""The default shapes of a world: those that the scripted teams read."""
LEAST_HOPS = {Shape.CHAIN: 1, Shape.COMPARISON: 2, Shape.INTERSECTION: 2}


@dataclass(frozen=True, slots=True)
class Hop:
    """One fact of a path: the page, what to look for, and its value."""

    page: int
    asks: str
    gives: str


@dataclass(frozen=True, slots=True)
class WorldQuestion:
    """A question with its gold answer and gold path. ``named`` holds the entities that the text names."""

    shape: Shape
    text: str
    answer: str
    path: tuple[Hop, ...]
    named: tuple[int, ...]

    @property
    def split(self) -> WorldSplit:
        """The question's split, by the hash of the entities that it names."""
        return split_of("/".join(map(str, sorted(self.named))))


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Two relations whose lists of subjects are intersected."""

    relations: tuple[str, str]
    words: str


_MEETINGS = (
    _Meeting(("birthplace", "guild"), "person {that} was born in {a} and works for the guild {b}"),
    _Meeting(("realm", "river"), "town {that} belongs to the realm {a} and lies on the river {b}"),
)


def generate(
    world: Encyclopaedia,
    split: WorldSplit,
    count: int,
    *,
    seed: int,
    hops: Sequence[int] = HOPS,
    shapes: Sequence[Shape] = SHAPES,
) -> Iterator[Task]:
    """Stream ``count`` distinct tasks of a split. The same arguments give the same tasks.

    Hops are distributed evenly, and also evenly over the shapes that allow the number of hops.

    Raises:
        ConfigError: No shape fits the hops, or the world holds fewer questions than requested.
    """
    kinds = [(n, shape) for n in hops for shape in shapes if n >= LEAST_HOPS[shape]]
    if not kinds or not set(hops) <= set(HOPS):
        raise ConfigError(
            f"hops {list(hops)}, shapes {[str(s) for s in shapes]}: expected hops from 1 to 4 that a shape allows"
        )
    rng = random.Random(f"{DATA_SOURCE}/{world.size}/{world.seed}/{split}/{seed}")
    seen: set[bytes] = set()
    levels = sorted({n for n, _ in kinds})
    for number in range(count):
        wanted = levels[number % len(levels)]
        choices = [shape for n, shape in kinds if n == wanted]
        question = _draw_new(rng, world, split, wanted, choices, seen)
        yield Task(
            id=f"{DATA_SOURCE}-{world.size}-{world.seed}-{split}-{seed}-{number:06d}",
            question=question.text,
            ground_truth=question.answer,
            data_source=DATA_SOURCE,
            extra_info={
                "shape": question.shape.value,
                "hops": len(question.path),
                "path": path_info(world, question.path),
            },
        )


def path_info(world: Encyclopaedia, path: Sequence[Hop]) -> list[dict[str, str]]:
    """Return the gold path for a task's ``extra_info``."""
    return [
        {
            "passage": str(hop.page),
            "title": world.names.name(hop.page),
            "asks": hop.asks,
            "gives": hop.gives,
        }
        for hop in path
    ]


def _draw_new(
    rng: random.Random,
    world: Encyclopaedia,
    split: WorldSplit,
    hops: int,
    shapes: Sequence[Shape],
    seen: set[bytes],
) -> WorldQuestion:
    draw = {Shape.CHAIN: chain, Shape.COMPARISON: _comparison, Shape.INTERSECTION: _intersection}
    for _ in range(_MAX_MISSES):
        question = draw[rng.choice(shapes)](rng, world, hops)
        if question is None or question.split is not split:
            continue
        mark = hashlib.sha256(question.text.encode()).digest()[:12]
        if mark not in seen:
            seen.add(mark)
            return question
    raise ConfigError(
        f"a world of {world.size:,} pages ran out of {hops}-hop questions of split {split.value!r} after "
        f"{len(seen):,}; ask for fewer, or for a larger world"
    )


def chain(rng: random.Random, world: Encyclopaedia, hops: int) -> WorldQuestion | None:
    """Return a question by depth from a random entity, or ``None`` if its facts lead back to a page."""
    start = rng.choice(world.ranges[rng.choice(tuple(EntityKind))])
    steps = walk(rng, world, start, hops - 1)
    if steps is None:
        return None
    path, end = steps
    last = _last_hop(rng, world, end, {start, *(hop.page for hop in path)})
    if last is None:
        return None
    path = [*path, last]
    text = f"What is the {chain_words(path)} {world.names.name(start)}?"
    return WorldQuestion(Shape.CHAIN, text, last.gives, tuple(path), (start,))


def _comparison(rng: random.Random, world: Encyclopaedia, hops: int) -> WorldQuestion | None:
    """Return a comparison of ``hops`` branches of one page each, or half as many of two pages."""
    kind = rng.choice(tuple(EntityKind))
    attribute = ATTRIBUTE_OF[kind]
    ways = [relation for relation in RELATION.values() if relation.object is kind]
    deep = hops == 4 and bool(ways) and rng.random() < 0.5
    named: list[int] = []
    branches: list[tuple[str, int, list[Hop]]] = []
    for _ in range(hops // 2 if deep else hops):
        if deep:
            relation = rng.choice(ways)
            start = rng.choice(world.ranges[relation.subject])
            target = world.object_of(relation, start)
            first = [Hop(start, relation.name, world.names.name(target))]
            words = f"the {relation.name} of {world.names.name(start)}"
        else:
            start = target = rng.choice(world.ranges[kind])
            first, words = [], world.names.name(start)
        named.append(start)
        branches.append((words, target, [*first, number_hop(world, target)]))
    values = [world.value(attribute, target) for _, target, _ in branches]
    pages = [hop.page for _, _, part in branches for hop in part]
    if len(set(values)) < len(values) or len(set(pages)) < len(pages):
        return None
    pick, words = rng.choice(((min, attribute.less), (max, attribute.more)))
    winner = branches[values.index(pick(values))][1]
    asked = [words for words, _, _ in branches]
    than = "" if len(asked) == 2 else " than the others"
    text = f"Which {words}{than}: {', '.join(asked[:-1])} or {asked[-1]}?"
    path = tuple(hop for _, _, part in branches for hop in part)
    return WorldQuestion(Shape.COMPARISON, text, world.names.name(winner), path, tuple(named))


def _intersection(rng: random.Random, world: Encyclopaedia, hops: int) -> WorldQuestion | None:
    """Return a question about two lists that share one entity, and a chain from that entity."""
    meeting = rng.choice(_MEETINGS)
    first, second = (RELATION[name] for name in meeting.relations)
    common = rng.choice(world.ranges[first.subject])
    a, b = world.object_of(first, common), world.object_of(second, common)
    if set(world.subjects_of(first, a)) & set(world.subjects_of(second, b)) != {common}:
        return None
    name = world.names.name(common)
    path = [Hop(a, f"{first.name} of whom", name), Hop(b, f"{second.name} of whom", name)]
    slots = {"a": world.names.name(a), "b": world.names.name(b)}
    if hops == 2:
        text = f"Which {meeting.words.format(that='', **slots)}?".replace("  ", " ")
        return WorldQuestion(Shape.INTERSECTION, text, name, tuple(path), (a, b))
    steps = walk(rng, world, common, hops - 3, {a, b})
    if steps is None:
        return None
    more, end = steps
    last = _last_hop(rng, world, end, {common, a, b, *(hop.page for hop in more)})
    if last is None:
        return None
    more = [*more, last]
    that = "who" if first.subject is EntityKind.PERSON else "that"
    text = f"What is the {chain_words(more)} the {meeting.words.format(that=that, **slots)}?"
    return WorldQuestion(Shape.INTERSECTION, text, last.gives, (*path, *more), (a, b))


def walk(
    rng: random.Random,
    world: Encyclopaedia,
    start: int,
    steps: int,
    avoid: frozenset[int] | set[int] = frozenset(),
) -> tuple[list[Hop], int] | None:
    """Follow ``steps`` random relations without visiting a page twice. Returns the facts and the last page."""
    path: list[Hop] = []
    been, here = {start, *avoid}, start
    for _ in range(steps):
        relation: Relation = rng.choice(OF_KIND[world.kind(here)])
        target = world.object_of(relation, here)
        if target in been:
            return None
        path.append(Hop(here, relation.name, world.names.name(target)))
        been.add(target)
        here = target
    return path, here


def _last_hop(rng: random.Random, world: Encyclopaedia, page: int, been: set[int]) -> Hop | None:
    """Return a random fact of ``page`` that does not lead back."""
    asked = rng.choice((*OF_KIND[world.kind(page)], None))
    if asked is None:
        return number_hop(world, page)
    target = world.object_of(asked, page)
    return None if target in been | {page} else Hop(page, asked.name, world.names.name(target))


def number_hop(world: Encyclopaedia, page: int) -> Hop:
    """Return the number on a page, for example the year in which its guild opened."""
    attribute = ATTRIBUTE_OF[world.kind(page)]
    return Hop(page, attribute.name, str(world.value(attribute, page)))


def chain_words(path: Sequence[Hop]) -> str:
    """Return the words of a chain with the last fact first: ``teacher of the author of``."""
    return " of the ".join(hop.asks for hop in reversed(path)) + " of"
