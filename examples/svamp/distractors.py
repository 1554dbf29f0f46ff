"""Add variants with an irrelevant number to word problems, so that a model learns to read which numbers matter.

SVAMP's questions mention quantities that the answer does not need. Questions of MAWPS and ASDiv-A, its published
training set, hardly ever do: a model trained on them learns to use every number. A variant adds an irrelevant number in
one of three ways. The program and the answer stay the same.

- more things: "Tom has 7 kites." becomes "Tom has 7 kites and 12 marbles."
- the same sentence of another thing: "Tom sold 9 marbles. Tom sold 2 kites."
- a statement from another training question, about the person of the question, if the question names one

The first two need a question that names its thing ("How many kites ...?"). The other things are those of the
training set, and their number is at most twice as large.

Usage: python examples/svamp/distractors.py data/svamp/tasks/train.jsonl data/svamp/tasks/sft.jsonl
           --rl data/svamp/tasks/rl.jsonl --seed 0
The output holds the questions themselves, each followed by its variant if it has one. `afm data distill` reads it. With
--rl, a fifth of the questions goes to another file. Reinforcement needs questions that fine-tuning has not shown: after
an epoch of all, only 9 of 32 groups of samples had both right and wrong answers.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from afm.datasets import Task, read_tasks, write_tasks
from afm.errors import DataError

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")
THINGS = re.compile(r"(?<![\w.$])(\d+) ((?:[a-z]+ )?[a-z]{2,}s)(?=[.,]| (?:in|on|at|from|for|to|and|of)\b)")
NO_THINGS = re.compile(
    r"\b(?:of|more|less|times|as|his|its|this|was|is|has|than|other|years|hours|minutes|days|weeks)\b"
)
SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z])")
NAME = re.compile(
    r"([A-Z][a-z]+) (?=(?:has|had|bought|picked|found|made|ate|gave|sold|saw|read|wrote|spent|baked)\b)"
)
NO_NAMES = {
    "There", "It", "He", "She", "They", "Each", "Every", "If", "This", "That", "We", "You", "Who", "Then",
    "The", "A", "An", "His", "Her", "Their", "My", "Our", "One", "Some", "After", "Before", "When", "At",
    "In", "On", "For",
}  # fmt: skip
PRONOUN = re.compile(
    r"\b(?:he|she|it|they|them|him|her|his|their|each|other|another|more|left|rest|total)\b", re.IGNORECASE
)
UNFIT = re.compile(
    r"\b[A-Z]|\b(?:dozen|cent|dollar)|\$|\d\.$"
)  # another name, an amount in another unit, or no noun
SMALL_WORDS = {
    "has", "had", "bought", "picked", "found", "made", "ate", "gave", "sold", "saw", "read", "wrote", "spent", "baked",
    "and", "the", "for", "with", "from", "his", "her", "that", "this", "were", "are", "was", "some", "into", "last",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence about one person, with one number.

    Attributes:
        rest: The sentence after the person's name.
        words: Words that say what it is about, in lower case.
    """

    name: str
    rest: str
    number: str
    words: frozenset[str]


def person(sentence: str) -> str | None:
    """Return the name that a sentence begins with, ``None`` for a pronoun or a thing."""
    match = NAME.match(sentence)
    return match[1] if match and match[1] not in NO_NAMES else None


def words(text: str) -> frozenset[str]:
    """Return the words of a text that say what it is about, in the singular and in lower case."""
    return frozenset(
        word.rstrip("s") for word in re.findall(r"[a-z]{3,}", text.lower()) if word not in SMALL_WORDS
    )


def statements(questions: Iterable[str]) -> Iterator[Statement]:
    """Find the sentences that can be moved into another question."""
    for question in questions:
        for sentence in SENTENCE.split(question):
            name, numbers = person(sentence), NUMBER.findall(sentence)
            if name and len(numbers) == 1 and sentence.endswith(".") and not PRONOUN.search(sentence):
                rest = sentence[len(name) :]
                if not UNFIT.search(rest):
                    yield Statement(name, rest, numbers[0], words(rest))


def variant(question: str, candidates: list[Statement], rng: random.Random, tries: int = 20) -> str | None:
    """Return the question with an irrelevant statement, ``None`` for a single sentence or without a fitting statement.

    A statement fits if it shares no word, no name and no number with the question.
    """
    sentences = SENTENCE.split(question)
    if len(sentences) < 2:
        return None
    names = {statement.name for statement in candidates}
    name = next((word for word in re.findall(r"[A-Z][a-z]+", question) if word in names), None)
    known, numbers = words(question), set(NUMBER.findall(question))
    for _ in range(tries):
        statement = rng.choice(candidates)
        if not statement.words & known and statement.number not in numbers and statement.name not in question:
            place = rng.randrange(1, len(sentences))
            return " ".join(
                [*sentences[:place], (name or statement.name) + statement.rest, *sentences[place:]]
            )
    return None


def things(text: str) -> Iterator[re.Match[str]]:
    """Find numbers of things, such as "7 red kites"."""
    return (match for match in THINGS.finditer(text) if not NO_THINGS.search(match[2]))


def more_things(question: str, names: list[str], rng: random.Random) -> str | None:
    """Return the question with a number of other things, ``None`` if its last sentence does not name what it counts."""
    sentences = SENTENCE.split(question)
    asked = words(sentences[-1])
    found = [
        (index, match)
        for index, sentence in enumerate(sentences[:-1])
        for match in things(sentence)
        if words(match[2]) and words(match[2]) <= asked
    ]
    fitting = [name for name in names if not words(name) & words(question)]
    if not found or not fitting:
        return None
    index, match = rng.choice(found)
    known = set(NUMBER.findall(question))
    number = next(n for n in iter(lambda: str(rng.randint(2, 2 * int(match[1]) + 9)), "") if n not in known)
    sentence, added = sentences[index], f"{number} {rng.choice(fitting)}"
    if len(NUMBER.findall(sentence)) == 1 and NAME.match(sentence) and rng.random() < 0.5:
        other = sentence[: match.start()] + added + sentence[match.end() :]
        sentences[index] = " ".join([other, sentence] if rng.random() < 0.5 else [sentence, other])
    else:
        both = [match[0], added] if rng.random() < 0.5 else [added, match[0]]
        sentences[index] = sentence[: match.start()] + " and ".join(both) + sentence[match.end() :]
    return " ".join(sentences)


def with_variants(tasks: list[Task], seed: int) -> Iterator[Task]:
    """Yield each task, followed by its variant if there is one. The same seed gives the same variants."""
    rng = random.Random(seed)
    candidates = list(dict.fromkeys(statements(task.question for task in tasks)))
    names = list(dict.fromkeys(match[2] for task in tasks for match in things(task.question)))
    for task in tasks:
        yield task
        question = more_things(task.question, names, rng)
        if question is None and candidates:
            question = variant(task.question, candidates, rng)
        if question:
            yield task.model_copy(update={"id": f"{task.id}-distractor", "question": question})


def held_out(question: str) -> bool:
    """Return whether a question is among the fifth for reinforcement. Texts that differ only in numbers stay together."""
    text = NUMBER.sub("0", " ".join(question.lower().split()))
    return hashlib.sha256(text.encode()).digest()[0] % 5 == 0


def main() -> None:
    """Read questions, add variants, and print how many."""
    parser = argparse.ArgumentParser(description="Add variants with an irrelevant number to word problems.")
    parser.add_argument(
        "source", type=Path, help="questions, JSONL (`afm data prepare`, docs/recipes/svamp.md)"
    )
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--rl", type=Path, help="file for a fifth of the questions, which `out` then lacks")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        tasks = list(read_tasks(options.source))
    except DataError as error:
        parser.error(str(error))
    parts = {options.out: [task for task in tasks if options.rl is None or not held_out(task.question)]}
    if options.rl is not None:
        parts[options.rl] = [task for task in tasks if held_out(task.question)]
    for file, part in parts.items():
        written = write_tasks(with_variants(part, options.seed), file)
        print(f"questions: {len(part)}, variants: {written - len(part)}, file: {file}")


if __name__ == "__main__":
    main()
