"""Add variants of word problems, so that a model learns to read what is asked and which numbers matter.

SVAMP's questions change a known problem a little: another quantity is asked, a number does not matter, something more
happens. MAWPS and ASDiv-A, its published training set, hardly ever do that. The variants of a training question are:

- distractor: a number that the answer does not need. More things: "Tom has 7 kites." becomes "Tom has 7 kites and 12
  marbles." The same sentence of another thing: "Tom sold 9 marbles. Tom sold 2 kites." Or a statement from another
  training question. Other things are those of the training set, and their number is at most twice as large.
- inverse: the answer is stated, and one of the numbers is asked. "He has 5 kites left. How many kites did he sell?"
- comparison: the total or the difference of two numbers of the question is asked, of one person or of two.
- change: something more happens before the question. "He then found 4 more kites."

Usage: python examples/svamp/variants.py data/svamp/tasks/train.jsonl data/svamp/tasks/sft.jsonl
           --rl data/svamp/tasks/rl.jsonl --seed 0
The output holds the questions, each followed by the variants that it has. A question with the same text as an earlier
one is left out, but its variants are kept. `afm data distill` reads the output. With --rl, a fifth of the questions goes
to another file. Reinforcement needs questions that fine-tuning has not shown: after an epoch of all, only 9 of 32 groups
of samples had both right and wrong answers.
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
from afm.datasets.readers.word_problems import printed_number, program_fields
from afm.errors import DataError

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")
THINGS = re.compile(r"(?<![\w.$])(\d+) ((?:[a-z]+ )?[a-z]{2,}s)(?=[.,]| (?:in|on|at|from|for|to|and)\b)")
NO_THINGS = re.compile(
    r"\b(?:of|more|less|times|as|his|its|this|to|was|were|are|is|has|had|than|other|ones|dozen|totals|equal|mrs|kids teenagers"
    r"|years|months|weeks|days|hours|minutes|seconds|pounds|tons|grams|kilograms|liters|gallons|acres|calories|degrees"
    r"|ounces|lbs|cents|miles|yards|feet|inches|meters|centimeters|kilometers)\b"
)
SENTENCE = re.compile(r"(?<=[.?!])(?<!Mrs\.)(?<!Mr\.)(?<!Ms\.)(?<!Dr\.)\s+(?=[A-Z])")
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
IRREGULAR = {
    "have": "had", "buy": "bought", "find": "found", "give": "gave", "eat": "ate", "sell": "sold", "make": "made",
    "get": "got", "take": "took", "spend": "spent", "grow": "grew", "win": "won", "lose": "lost", "put": "put",
    "see": "saw", "read": "read", "catch": "caught", "draw": "drew", "write": "wrote", "bring": "brought", "run": "ran",
}  # fmt: skip
REGULAR = (
    "pick", "bake", "place", "plant", "collect", "use", "play", "score", "earn", "share", "delete", "receive", "save",
    "walk", "borrow", "remove", "add", "pack", "paint", "need", "want", "start", "end", "cook", "finish", "wash", "return",
)  # fmt: skip
PAST = IRREGULAR | {verb: verb.removesuffix("e") + "ed" for verb in REGULAR}
INFINITIVE = {past: verb for verb, past in PAST.items()}
PRESENT = {"has" if verb == "have" else verb + ("es" if verb[-1] in "sh" else "s"): verb for verb in PAST}
THIRD_PERSON = {verb: present for present, verb in PRESENT.items()}
THING = (
    r"(?P<thing>(?!(?:of|them|more|less|fewer|dozen|away|times|dollars|than|to|in|on|at|for|from|with|during)\b)[a-z]+"
    r"(?: (?!(?:of|than|that|away|left|in|on|at|for|from|to|with|during|total|totaled)\b)[a-z]+){0,2}?)(?<!ing)"
)
QUESTION = re.compile(
    rf"How many {THING} (?P<helper>did|does|do|will) (?P<subject>(?:the )?[A-Za-z]+) (?P<now>now )?"
    r"(?P<verb>[a-z]+)(?P<rest>(?:(?! how\b) [A-Za-z']+)*)\?"
)
PART = (
    r"(?: (?:in|on|at|from|for|to|with|during|last|this|yesterday|today|after|before)\b"
    r"(?:(?! \d| s?he\b| they\b)[^,.?])*)?"
)
FACT = re.compile(
    rf"(?P<subject>(?:The )?[A-Z][a-z]+) (?P<verb>[a-z]+) (?P<number>\d+)"
    rf"(?P<of> of (?:his|her|the|their)| more| new|)(?: {THING})?(?P<rest>{PART})\."
)
ITEM = r"\d+(?: (?!and\b)[a-z]+){1,2}"
COUNTED = re.compile(
    rf"(?P<subject>[A-Z][a-z]+) (?P<verb>[a-z]+) (?P<things>{ITEM}(?:(?:,? and|,)? {ITEM})*)(?! for each){PART}"
)
CLAUSE = re.compile(r",? (?:and|while|but) (?=[A-Z])|, (?=[A-Z])|, but ")
CHANGED = re.compile(
    r"\b(?:gives?|gave|takes?|took|loses?|lost|shares?|shared|finds?|found|buys?|bought|sells?|sold|selling|spends?|spent"
    r"|eats?|ate|eating|uses?|used(?! [a-z]+s\b)|borrowed|gets?|got|deleted|stole|blew|picked|another|left|more(?! [a-z ]*tha[nt])"
    r"|of (?:them|it|his|her|the))\b"
)
ONE_STEP = re.compile(r"print\((\d+)([-+*/])(\d+)\)")
INVERSE = {
    "+": ("{c}-{b}", "{c}-{a}"), "-": ("{c}+{b}", "{a}-{c}"),
    "*": ("{c}/{b}", "{c}/{a}"), "/": ("{c}*{b}", "{a}/{c}"),
}  # fmt: skip
"""Programs for the first and the second number of a program a+b, a-b, a*b or a/b with the result c."""
CHANGES = (
    "lost {} {}-", "gave {} {} to a friend-", "sold {} {}-",
    "bought {} more {}+", "found {} more {}+", "got {} more {} as a present+",
)  # fmt: skip


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


def with_statement(
    question: str, candidates: list[Statement], rng: random.Random, tries: int = 20
) -> str | None:
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


def helper(verb: str) -> tuple[str, str] | None:
    """Return the helping verb and the infinitive ("sold": did, sell), ``None`` for an unknown verb."""
    if verb in INFINITIVE:
        return "did", INFINITIVE[verb]
    return ("does", PRESENT[verb]) if verb in PRESENT else None


def stated(question: re.Match[str], answer: str) -> str | None:
    """Return the statement that answers a question of the form :data:`QUESTION`, ``None`` for an unknown verb."""
    verb, rest, subject = question["verb"], question["rest"], question["subject"]
    if verb not in PAST:
        return None
    form = {"did": PAST[verb], "does": THIRD_PERSON[verb], "do": verb, "will": f"will {verb}"}[
        question["helper"]
    ]
    if verb == "end" and (particle := re.match(r" (?:up )?with\b", rest)):
        form, rest = form + particle[0], rest[particle.end() :]
    return (
        f"{subject[0].upper()}{subject[1:]} {question['now'] or ''}{form} {answer} {question['thing']}{rest}."
    )


def inverse(task: Task, rng: random.Random) -> tuple[str, str] | None:
    """Return a question for one of the numbers, with the answer as a statement, and its expression."""
    sentences = SENTENCE.split(task.question)
    one_step = ONE_STEP.fullmatch(task.extra_info["program"])
    asked = QUESTION.fullmatch(sentences[-1])
    answer = stated(asked, task.ground_truth) if asked else None
    if not one_step or not asked or not answer or one_step[1] == one_step[3]:
        return None
    values = {"a": one_step[1], "b": one_step[3], "c": task.ground_truth}
    found = []
    for number, expression in zip((values["a"], values["b"]), INVERSE[one_step[2]], strict=True):
        places = [index for index, text in enumerate(sentences[:-1]) if number in NUMBER.findall(text)]
        fact = FACT.fullmatch(sentences[places[0]]) if len(places) == 1 else None
        verb = helper(fact["verb"]) if fact else None
        if not fact or not verb or fact["subject"] in NO_NAMES - {"He", "She", "They", "It"}:
            continue
        same = asked["subject"].lower() in (fact["subject"].lower(), "he", "she")
        at_first = (
            verb[1] == "have"
            and places[0] == 0
            and (same or re.search(r"\b(?:left|now|end)\b", sentences[-1]))
        )
        if verb[1] == "have" and (len(sentences) < 3 or re.search(r"\bwhen\b", fact["rest"])):
            continue
        verb = ("did", "have") if at_first else verb
        subject, text = fact["subject"], sentences[places[0]]
        subject = subject if subject not in NO_NAMES and " " not in subject else subject.lower()
        ask = f"How many {fact['thing'] or asked['thing']} {verb[0]} {subject} {verb[1]}{fact['rest']}"
        unknown = f"{text[: fact.start('number')]}some{text[fact.end('number') :]}"
        rest = [*sentences[: places[0]], unknown, *sentences[places[0] + 1 : -1], answer]
        found.append(
            (" ".join([*rest, f"{ask}{' at first' if at_first else ''}?"]), expression.format_map(values))
        )
    return rng.choice(found) if found else None


def counts(sentence: str) -> Iterator[tuple[str, str, int, str]]:
    """Yield who did what with how many of which things: a name, a verb, a number, a noun."""
    for clause in CLAUSE.split(sentence.rstrip(".")):
        counted = COUNTED.fullmatch(clause)
        if counted and counted["subject"] not in NO_NAMES and helper(counted["verb"]):
            for thing in things(f"{counted['things']}."):
                yield counted["subject"], counted["verb"], int(thing[1]), thing[2]


def comparison(question: str, rng: random.Random) -> tuple[str, str] | None:
    """Return the text with a question for the total or the difference of two of its numbers, and its expression.

    If the text says that something changes, what a person has is asked "at first".
    """
    *body, _ = SENTENCE.split(question)
    text, known = " ".join(body), [fact for sentence in body for fact in counts(sentence)]
    found = []
    for index, one in enumerate(known):
        for other in known[index + 1 :]:
            low, high = sorted((one, other), key=lambda fact: fact[2])
            forms = helper(one[1])
            if one[1] != other[1] or low[2] == high[2] or forms is None:
                continue
            does, do, first = *forms, ""
            later = (
                r"\b(?:has|had) some\b"
                if do == "have"
                else rf"\b{one[1]}\b[^.]*\d+ more\b(?! [a-z ]*tha[nt])"
            )
            if re.search(later, text):
                continue
            if do == "have" and CHANGED.search(text):
                does, first = "did", " at first"
            total, difference = f"{one[2]}+{other[2]}", f"{high[2]}-{low[2]}"
            (few, _, _, thing), (many, _, _, thing_2) = low, high
            if few == many and thing != thing_2:
                ask = f"{does} {few} {do}"
                found.append((f"How many more {thing_2} than {thing} {ask}{first}?", difference))
                found.append((f"How many {one[3]} and {other[3]} {ask}{first or ' in all'}?", total))
            elif few != many and thing == thing_2:
                both = f"{'did' if does == 'did' else 'do'} {one[0]} and {other[0]}"
                found.append((f"How many more {thing} {does} {many} {do} than {few}{first}?", difference))
                found.append((f"How many fewer {thing} {does} {few} {do} than {many}{first}?", difference))
                found.append((f"How many {thing} {both} {do} together{first}?", total))
    if not found:
        return None
    ask, expression = rng.choice(found)
    return " ".join([*body, ask]), expression


def change(task: Task, rng: random.Random) -> tuple[str, str] | None:
    """Return the question after one more change, and its expression."""
    *body, ask = SENTENCE.split(task.question)
    asked, expression = QUESTION.fullmatch(ask), task.extra_info["program"][len("print(") : -1]
    text, amount = rng.choice(CHANGES), rng.randint(2, max(2, int(task.ground_truth) - 1))
    if (
        not asked
        or not body
        or str(amount) in NUMBER.findall(task.question)
        or amount >= int(task.ground_truth)
    ):
        return None
    if (
        asked["verb"] not in ("have", "end")
        or asked["helper"] == "will"
        or re.search(r"together|before|start|begin|first|complete|original|\bto\b", asked["rest"])
        or re.search(r"(?:problems|pages|points|miles|rooms|gardens)$", asked["thing"])
        or not re.fullmatch(r"[-+*/()\d]+", expression)
    ):
        return None
    subject = asked["subject"][0].upper() + asked["subject"][1:]
    happened = f"{subject} then {text[:-1].format(amount, asked['thing'])}."
    return " ".join([*body, happened, ask]), f"{expression}{text[-1]}{amount}"


def whole_result(program: str) -> str | None:
    """Return what a program of one line prints, ``None`` if that is no whole number of 0 or more."""
    try:
        value = printed_number([program])
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        return None
    return str(int(value)) if value is not None and value >= 0 and float(value).is_integer() else None


def other_questions(task: Task, names: list[str], rng: random.Random) -> Iterator[Task]:
    """Yield an inverse, a comparison and a change of a task, those that it has. Half of them get other things, too."""
    program = task.extra_info.get("program", "")
    if not task.ground_truth.isdigit() or program.count("\n") or not program.startswith("print("):
        return
    crowded = task.model_copy(update={"question": more_things(task.question, names, rng) or task.question})
    made = {
        "inverse": inverse(rng.choice((task, crowded)), rng),
        "comparison": comparison(crowded.question, rng),
        "change": change(rng.choice((task, crowded)), rng),
    }
    # A few published equations do not give their answer, so nothing follows from them.
    if whole_result(program) != task.ground_truth:
        return
    for kind, (question, expression) in ((kind, new) for kind, new in made.items() if new):
        lines = [f"print({expression})"]
        gold = whole_result(lines[0])
        if gold is None:
            continue
        extra = {"steps": sum(map(expression.count, "+-*/"))} | program_fields(lines, gold)
        new = {"id": f"{task.id}-{kind}", "question": question, "ground_truth": gold, "extra_info": extra}
        yield task.model_copy(update=new)


def with_variants(tasks: list[Task], seed: int) -> Iterator[Task]:
    """Yield each task, followed by its variants. The same seed gives the same variants."""
    rng = random.Random(seed)
    candidates = list(dict.fromkeys(statements(task.question for task in tasks)))
    names = list(dict.fromkeys(match[2] for task in tasks for match in things(task.question)))
    seen = set()
    for task in tasks:
        if task.question not in seen:
            yield task
        seen.add(task.question)
        question = more_things(task.question, names, rng)
        if question is None and candidates:
            question = with_statement(task.question, candidates, rng)
        if question:
            yield task.model_copy(update={"id": f"{task.id}-distractor", "question": question})
        yield from other_questions(task, names, rng)


def held_out(question: str) -> bool:
    """Return whether a question is among the fifth for reinforcement. Texts that differ only in numbers stay together."""
    text = NUMBER.sub("0", " ".join(question.lower().split()))
    return hashlib.sha256(text.encode()).digest()[0] % 5 == 0


def main() -> None:
    """Read questions, add variants, and print how many."""
    parser = argparse.ArgumentParser(description="Add variants of word problems.")
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
        different = len({task.question for task in part})
        print(
            f"different questions: {different} of {len(part)}, variants: {written - different}, file: {file}"
        )


if __name__ == "__main__":
    main()
