"""A generated world of arithmetic word problems with exact gold answers.

With two-digit operands, a tiny model cannot compute the answers itself, so a code tool is worth calling. The hash of an
expression decides its split, so splits share no expression and no question, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from afm.datasets.schema import Task, write_tasks
from afm.errors import ConfigError
from afm.runs.folder import write_manifest

DATA_SOURCE = "mini_math"
ONE_STEP_SHARE = 0.52
"""Usual share of problems with one operation. The others have two."""

_MAX_MISSES = 2_000
_PEOPLE = ("Tom", "Mia", "Ana", "Leo", "Zoe", "Max", "Eva", "Ian", "Kim", "Sam")


class WorldSplit(StrEnum):
    """The three disjoint parts of the world."""

    TRAIN = "train"
    RL = "rl"
    HELDOUT = "heldout"


_HASH_BELOW = {WorldSplit.TRAIN: 55, WorldSplit.RL: 92, WorldSplit.HELDOUT: 100}
DEFAULT_SIZES = {WorldSplit.TRAIN: 6_000, WorldSplit.RL: 4_096, WorldSplit.HELDOUT: 200}


@dataclass(frozen=True, slots=True)
class Story:
    """One kind of problem: sentences with the slots ``{who}``, ``{what}`` and ``{n}``."""

    kind: str
    opening: str
    changes: dict[str, str]
    question: str
    who: tuple[str, ...]
    what: tuple[str, ...]


STORIES = (
    Story(
        "collect",
        "{who} has {n} {what}.",
        {
            "+": "{who} finds {n} more.",
            "-": "{who} gives away {n}.",
            "*": "Then the number of {what} grows {n} times.",
        },
        "How many {what} does {who} have?",
        _PEOPLE,
        ("apples", "coins", "shells"),
    ),
    Story(
        "shop",
        "The {who} has {n} {what}.",
        {"+": "It buys {n} more.", "-": "It sells {n}.", "*": "Then its stock of {what} grows {n} times."},
        "How many {what} does the {who} have?",
        ("shop", "store"),
        ("pens", "cards", "beads"),
    ),
    Story(
        "travel",
        "{who} is {n} {what} from home.",
        {
            "+": "{who} goes {n} more.",
            "-": "{who} goes back {n}.",
            "*": "Then the distance in {what} grows {n} times.",
        },
        "How many {what} is {who} from home?",
        _PEOPLE,
        ("miles", "steps"),
    ),
    Story(
        "farm",
        "A {who} has {n} {what}.",
        {"+": "{n} more come.", "-": "{n} run away.", "*": "Then the number of {what} grows {n} times."},
        "How many {what} does the {who} have?",
        ("farm", "zoo"),
        ("hens", "goats"),
    ),
    Story(
        "library",
        "The {who} owns {n} {what}.",
        {"+": "It gets {n} more.", "-": "It lends {n}.", "*": "Then its stock of {what} grows {n} times."},
        "How many {what} does the {who} own?",
        ("library", "school"),
        ("books", "maps"),
    ),
)


@dataclass(frozen=True, slots=True)
class StoryProblem:
    """The arithmetic of one story: a first number, and operator (``+ - *``) and operand of each step."""

    kind: str
    start: int
    changes: tuple[tuple[str, int], ...]

    @property
    def expression(self) -> str:
        """The expression in Python, with only the necessary parentheses."""
        text, loose = str(self.start), False
        for operator, operand in self.changes:
            text = f"({text})" if operator == "*" and loose else text
            text += f"{operator}{operand}"
            loose = operator != "*"
        return text

    @property
    def grouped(self) -> bool:
        """Whether the expression needs parentheses."""
        return "(" in self.expression

    @property
    def answer(self) -> int:
        """The exact result."""
        value = self.start
        for operator, operand in self.changes:
            value = _apply(operator, value, operand)
        return value


def generate(
    split: WorldSplit,
    count: int,
    *,
    seed: int,
    stories: Sequence[Story] = STORIES,
    one_step_share: float = ONE_STEP_SHARE,
    grouped_share: float | None = None,
) -> Iterator[Task]:
    """Stream ``count`` distinct tasks of a split in random order. The same arguments give the same tasks.

    Exactly ``round(one_step_share * count)`` of them have one step. The others have two, and ``grouped_share`` of these
    need parentheses. By default it is what chance gives, 2 of 9.

    Raises:
        ConfigError: The world holds fewer problems than requested.
    """
    rng = random.Random(f"{DATA_SOURCE}/{split}/{seed}")
    ones = round(one_step_share * count)
    grouped = round((grouped_share or 0) * (count - ones))
    shapes = [(1, False)] * ones + [(2, True)] * grouped + [(2, False)] * (count - ones - grouped)
    rng.shuffle(shapes)
    seen: set[str] = set()
    for number, (length, parentheses) in enumerate(shapes):
        wanted = None if grouped_share is None else parentheses
        problem, question = _draw_new(rng, stories, split, length, wanted, seen)
        yield Task(
            id=f"{DATA_SOURCE}-{split}-{seed}-{number:05d}",
            question=question,
            ground_truth=str(problem.answer),
            data_source=DATA_SOURCE,
            extra_info={"kind": problem.kind, "steps": length, "expression": problem.expression},
        )


def write_world(
    out_dir: str | Path, *, seed: int, sizes: Mapping[WorldSplit, int] = DEFAULT_SIZES
) -> dict[WorldSplit, Path]:
    """Write ``train.jsonl``, ``rl.jsonl``, ``heldout.jsonl`` and a manifest, and return the three paths."""
    out = Path(out_dir)
    paths = {split: out / f"{split.value}.jsonl" for split in sizes}
    for split, path in paths.items():
        write_tasks(generate(split, sizes[split], seed=seed), path)
    counts = {split.value: count for split, count in sizes.items()}
    write_manifest(out / "manifest.json", counts=counts, seed=seed, world=DATA_SOURCE)
    return paths


def split_of(key: str) -> WorldSplit:
    """Return the split of a problem by the hash of ``key``, here its expression."""
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100
    return next(split for split, bound in _HASH_BELOW.items() if bucket < bound)


def read_problem(question: str) -> StoryProblem | None:
    """Parse a question of this world by its wording. Returns ``None`` for any other text."""
    sentences = re.split(r"(?<=[.?]) ", question.strip())
    if len(sentences) < 3:
        return None
    opening, *changes, asked = sentences
    for story in STORIES:
        begin = _pattern(story.opening).fullmatch(opening)
        if begin is None or not _pattern(story.question).fullmatch(asked):
            continue
        steps = [_read_change(story, sentence) for sentence in changes]
        known = tuple(step for step in steps if step is not None)
        if len(known) == len(steps):
            return StoryProblem(story.kind, int(begin["n"]), known)
    return None


def _draw_new(
    rng: random.Random,
    stories: Sequence[Story],
    split: WorldSplit,
    steps: int,
    grouped: bool | None,
    seen: set[str],
) -> tuple[StoryProblem, str]:
    for _ in range(_MAX_MISSES):
        story = rng.choice(stories)
        problem = _draw(rng, story.kind, steps)
        if grouped is not None and problem.grouped is not grouped:
            continue
        question = _write_question(rng, story, problem)
        if question not in seen and split_of(problem.expression) is split:
            seen.add(question)
            return problem, question
    raise ConfigError(
        f"the world ran out of {steps}-step problems of split {split.value!r} after {len(seen):,}; ask for fewer"
    )


def _draw(rng: random.Random, kind: str, steps: int) -> StoryProblem:
    start = rng.randint(12, 99)
    value, changes = start, []
    for _ in range(steps):
        operator = rng.choice("+-*" if value > 1 else "+")
        high = {"+": 99, "-": min(99, value - 1), "*": 9}[operator]
        operand = rng.randint(min(12, high) if operator != "*" else 2, high)
        value = _apply(operator, value, operand)
        changes.append((operator, operand))
    return StoryProblem(kind, start, tuple(changes))


def _write_question(rng: random.Random, story: Story, problem: StoryProblem) -> str:
    slots = {"who": rng.choice(story.who), "what": rng.choice(story.what)}
    sentences = [story.opening.format(n=problem.start, **slots)]
    sentences += [story.changes[operator].format(n=operand, **slots) for operator, operand in problem.changes]
    return " ".join([*sentences, story.question.format(**slots)])


def _apply(operator: str, value: int, operand: int) -> int:
    if operator == "+":
        return value + operand
    return value - operand if operator == "-" else value * operand


def _read_change(story: Story, sentence: str) -> tuple[str, int] | None:
    for operator, template in story.changes.items():
        if match := _pattern(template).fullmatch(sentence):
            return operator, int(match["n"])
    return None


@cache
def _pattern(template: str) -> re.Pattern[str]:
    text = re.escape(template).replace(r"\{n\}", r"(?P<n>\d+)")
    return re.compile(text.replace(r"\{who\}", r"\w+").replace(r"\{what\}", r"\w+"))
