"""Larger questions from a world's graph: by depth (a longer chain) and by width (sub-questions that are combined).

A question is given out only with a proof that it needs as many pages as it claims (:mod:`afm.datasets.encyclopaedia.proof`).
Depth and width: AFM (arXiv 2508.13167), its expansion of queries.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from afm.datasets.encyclopaedia.proof import Proof, prove
from afm.datasets.encyclopaedia.questions import (
    DATA_SOURCE,
    Hop,
    Question,
    Shape,
    chain_words,
    split_of,
    walk,
)
from afm.datasets.encyclopaedia.relations import ATTRIBUTE_OF, OF_KIND, Kind
from afm.datasets.encyclopaedia.world import Encyclopaedia
from afm.datasets.mini_world import Split
from afm.datasets.schema import Task
from afm.errors import ConfigError

_MAX_MISSES = 20_000


class Growth(StrEnum):
    """The direction in which a question grows."""

    DEPTH = "depth"
    """A chain of facts, each found with the one before."""
    WIDTH = "width"
    """Chains side by side whose numbers are combined."""


@dataclass(frozen=True, slots=True)
class _Combination:
    """What is done with the numbers that the branches give."""

    name: str
    words: str
    result: Callable[[Sequence[int]], int]
    pairs_only: bool = False


_COMBINATIONS = (
    _Combination(
        "difference", "What is the difference between {branches}?", lambda n: abs(n[0] - n[1]), True
    ),
    _Combination("sum", "What is the sum of {branches}?", sum),
    _Combination("largest", "What is the largest of these numbers: {branches}?", max),
    _Combination("smallest", "What is the smallest of these numbers: {branches}?", min),
)


def expand(
    world: Encyclopaedia,
    split: Split,
    count: int,
    *,
    seed: int,
    growth: Growth,
    depths: Sequence[int],
    widths: Sequence[int] = (1,),
) -> Iterator[Task]:
    """Stream ``count`` distinct tasks; the same arguments give the same ones.

    Args:
        depths: Facts of a chain, dealt evenly.
        widths: Chains of a question by width, dealt evenly.

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
            id=f"{DATA_SOURCE}-{growth}-{world.size}-{world.seed}-{split}-{seed}-{number:06d}",
            question=question.text,
            ground_truth=question.answer,
            data_source=DATA_SOURCE,
            extra_info=_info(world, question, proof, growth, depth, width),
        )


def _info(
    world: Encyclopaedia, question: Question, proof: Proof, growth: Growth, depth: int, width: int
) -> dict[str, Any]:
    title = world.names.name
    return {
        "shape": growth.value,
        "hops": proof.reads,
        "depth": depth,
        "width": width,
        "path": [
            {"passage": str(hop.page), "title": title(hop.page), "asks": hop.asks, "gives": hop.gives}
            for hop in question.path
        ],
        "proof": {"reads": proof.reads, "pages": [str(page) for page in proof.pages], "only": proof.only},
    }


def _proved(
    rng: random.Random,
    world: Encyclopaedia,
    split: Split,
    growth: Growth,
    depth: int,
    width: int,
    seen: set[str],
) -> tuple[Question, Proof]:
    """A new question of the split whose every fact needs a page of its own."""
    for _ in range(_MAX_MISSES):
        question = _deep(rng, world, depth) if growth is Growth.DEPTH else _wide(rng, world, depth, width)
        if question is None or question.text in seen or split_of(question) is not split:
            continue
        proof = prove(world, question.path, question.answer)
        if proof.reads == len(question.path) and proof.only and not proof.early:
            seen.add(question.text)
            return question, proof
    raise ConfigError(
        f"a world of {world.size:,} pages ran out of questions by {growth} (depth {depth}, width {width}) of split "
        f"{split.value!r} after {len(seen):,}; ask for fewer or smaller ones, or for a larger world"
    )


def _deep(rng: random.Random, world: Encyclopaedia, depth: int) -> Question | None:
    start = rng.choice(world.ranges[rng.choice(tuple(Kind))])
    found = walk(rng, world, start, depth - 1)
    if found is None:
        return None
    path, end = found
    asked = rng.choice((*OF_KIND[world.kind(end)], None))
    if asked is None:
        path = [*path, _number(world, end)]
    else:
        target = world.object_of(asked, end)
        if target == end or any(target == hop.page for hop in path):
            return None
        path = [*path, Hop(end, asked.name, world.names.name(target))]
    text = f"What is the {chain_words(path)} {world.names.name(start)}?"
    return Question(Shape.CHAIN, text, path[-1].gives, tuple(path), (start,))


def _wide(rng: random.Random, world: Encyclopaedia, depth: int, width: int) -> Question | None:
    branches: list[str] = []
    path: list[Hop] = []
    named: list[int] = []
    numbers: list[int] = []
    for _ in range(width):
        start = rng.choice(world.ranges[rng.choice(tuple(Kind))])
        found = walk(rng, world, start, depth - 1, {hop.page for hop in path})
        if found is None or found[1] in {hop.page for hop in path}:
            return None
        own = [*found[0], _number(world, found[1])]
        branches.append(f"the {chain_words(own)} {world.names.name(start)}")
        named.append(start)
        numbers.append(int(own[-1].gives))
        path += own
    pages = [hop.page for hop in path]
    if len(set(pages)) < len(pages) or len(set(numbers)) < len(numbers):
        return None
    choices = [way for way in _COMBINATIONS if width == 2 or not way.pairs_only]
    way = rng.choice(choices)
    words = f"{', '.join(branches[:-1])} and {branches[-1]}"
    text = way.words.format(branches=words)
    return Question(Shape.COMPARISON, text, str(way.result(numbers)), tuple(path), tuple(named))


def _number(world: Encyclopaedia, page: int) -> Hop:
    attribute = ATTRIBUTE_OF[world.kind(page)]
    return Hop(page, attribute.name, str(world.value(attribute, page)))
