"""Parse plans and calls in a reply and match them with the expected plan, as T-Eval's published evaluator does.

T-Eval is arXiv 2312.14033. Steps are compared by text similarity, 0 to 1: by a sentence model, or without one by words.
"""

from __future__ import annotations

import ast
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from afm.errors import ConfigError, MissingExtraError

_FENCE = "```json"
_NAMES = (re.compile(r"\w+\.\w+"), re.compile("FinishAction"))
_TURN_ENDS = (
    "<eoa>",
    "<TOKENS_UNUSED_1>",
    "<|im_end|>",
    "\nuser",
    "\nassistant",
    "\nUSER",
    "[INST]",
    "<|user|>",
)
FINISH = "FinishAction"
_LONGEST = 100_000


def cleaned(reply: str) -> str:
    """Return the part of a reply that the published program scores: up to the mark of the next turn, without a fence."""
    for mark in _TURN_ENDS:
        reply = reply.partition(mark)[0]
    return reply.strip().removeprefix(_FENCE).strip("`").strip()


def literal(text: str, opening: str = "", closing: str = "") -> Any:
    """Parse the value in a reply: a Python literal, else JSON, else JSON with single quotes.

    Args:
        opening, closing: Text before the first and after the last of these characters is dropped.

    Raises:
        ValueError: The reply has no known form.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"longer than {_LONGEST} characters")
    if _FENCE in text:
        text = text.partition(_FENCE)[2].strip("`")
    if opening:
        start = text.find(opening)
        text = text[start:] if start >= 0 else ""
    if closing:
        text = text[: text.rfind(closing) + 1]
    attempts: tuple[Callable[[], Any], ...] = (
        lambda: ast.literal_eval(text),
        lambda: json.loads(text),
        lambda: json.loads(text.replace("'", '"')),
    )
    for attempt in attempts:
        try:
            return attempt()
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise ValueError("neither JSON nor a literal")


def instructed(reply: str, form: str, template: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Return action and arguments of a reply in the requested form, or ``None`` if it has another form.

    Args:
        form: ``json`` is an object with the keys that ``template`` names. Any other form is text between its marks.
    """
    return _of_object(reply, template) if form == "json" else _of_marks(reply, template)


def _of_object(reply: str, template: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    try:
        parts = literal(reply)
        _, action, args = (parts[template[key]] for key in _PARTS)
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return action, args if isinstance(args, dict) else {}


def _of_marks(reply: str, template: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Parse the marks as regular expressions with their own groups, as the published program does."""
    marks = [str(template.get(f"{part}_{end}", "")) for part in _PARTS for end in ("start", "end")]
    pattern = "".join(f"{marks[2 * at]}(.*){marks[2 * at + 1]}" for at in range(len(_PARTS)))
    try:
        match = re.search(pattern, reply[:_LONGEST], re.DOTALL)
    except re.error:
        return None
    if match is None:
        return None
    _, action, text = match.groups("")[: len(_PARTS)]
    try:
        args = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        args = {}
    return action.strip(), args if isinstance(args, dict) else {}


_PARTS = ("thought", "action", "args")


def call(reply: Any, form: str = "json") -> dict[str, Any] | None:
    """Return ``thought``, ``name`` and ``args`` of a call in a JSON object or its text, or ``None`` if it is not an object.

    Absent values are empty strings. Arguments that are not an object become an empty one, or their text in the form
    ``str``.
    """
    try:
        value = literal(reply, "{", "}") if isinstance(reply, str) else reply
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    fields = {key: str(value[key]) if key in value else "" for key in ("thought", "name", "args")}
    args = value.get("args")
    return {**fields, "args": fields["args"] if form == "str" else args if isinstance(args, dict) else {}}


def names_alone(reply: str, name: str) -> bool:
    """Return whether a reply in words names only this tool."""
    return name in reply and all(other == name for names in _NAMES for other in names.findall(reply))


def option(reply: str, form: str) -> Any:
    """Return the letter that ends a review after the first colon, or its JSON verdict; ``None`` if it has neither."""
    if form != "json":
        text = reply[reply.find(":") + 1 :].strip()
        return text[0] if text[:1] and text[0] in "ABCDE" else None
    try:
        verdict = literal(reply)["is_finished"]
        return {"review": verdict} if verdict in (True, False) else None
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def plan_of_json(reply: Any) -> list[tuple[str, str]]:
    """Return names and arguments of a plan's steps in order of their ids. Empty if the plan or one step is invalid."""
    try:
        value = literal(reply, "[", "]") if isinstance(reply, str) else reply
        if not isinstance(value, list):
            return []
        steps = [(int(step["id"]), str(step["name"]), str(step["args"])) for step in value]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError):
        return []
    return [(name, args) for _, name, args in sorted(steps, key=lambda step: step[0])]


def plan_of_text(reply: str, tools: Sequence[str]) -> list[tuple[str, str]]:
    """Return the first tool that each sentence or line names, with the sentence as its arguments."""
    steps = []
    for sentence in reply[:_LONGEST].replace(". ", "\n").split("\n"):
        named = [(place, tool) for tool in tools if (place := sentence.find(tool)) >= 0]
        if named:
            steps.append((min(named, key=lambda step: step[0])[1], sentence))
    return steps


NAME_WEIGHT, ARGS_WEIGHT, THRESHOLD = 0.75, 0.25, 0.8
_MOST_STEPS = 200

Step = tuple[str, str]
"""Name and arguments of a step."""


def plan_f1(actual: Sequence[Step], expected: Sequence[Step], similarity: Similarity) -> float:
    """Return the F1 of the steps that match in the expected order.

    The similarity of two steps is 0.75 of that of their names plus 0.25 of that of their arguments. Pairs above 0.8 are
    matched to maximise the sum. The longest series of matches in the expected order counts. As in the owner's program, its
    length is at least one, even without a match. A final ``FinishAction`` does not count.
    """
    actual, expected = _unfinished(actual)[:_MOST_STEPS], _unfinished(expected)
    if not actual or not expected:
        return 0.0
    names = similarity.matrix([name for name, _ in actual], [name for name, _ in expected])
    args = similarity.matrix([text for _, text in actual], [text for _, text in expected])
    weights = [
        [NAME_WEIGHT * name + ARGS_WEIGHT * arg for name, arg in zip(*lines, strict=True)]
        for lines in zip(names, args, strict=True)
    ]
    good = [[weight if weight > THRESHOLD else 0.0 for weight in line] for line in weights]
    places = [place for place in best_matching(good) if place is not None]
    matched = max(1, longest_rise(places))
    recall, precision = matched / len(expected), matched / len(actual)
    return 2 * recall * precision / (recall + precision)


def longest_rise(places: Sequence[int]) -> int:
    """Return the length of the longest increasing subsequence."""
    lengths: list[int] = []
    for at, place in enumerate(places):
        before = [lengths[i] for i in range(at) if places[i] < place]
        lengths.append(1 + max(before, default=0))
    return max(lengths, default=0)


def best_matching(weights: Sequence[Sequence[float]]) -> list[int | None]:
    """Return the column of each row in the matching with the largest sum, or ``None`` for a row without a weight above 0.

    The Hungarian method with potentials (Kuhn 1955; Jonker and Volgenant 1987), on a square padded with zeros.
    """
    size = max(len(weights), len(weights[0]))
    cost = [[0.0] * (size + 1)]
    for row in range(size):
        row_weights = list(weights[row]) if row < len(weights) else []
        cost.append([0.0, *(-weight for weight in row_weights), *([0.0] * (size - len(row_weights)))])
    row_potential, column_potential = [0.0] * (size + 1), [0.0] * (size + 1)
    row_of, way = [0] * (size + 1), [0] * (size + 1)
    for row in range(1, size + 1):
        _augment(row, cost, row_potential, column_potential, row_of, way)
    columns = {row_of[column] - 1: column - 1 for column in range(1, size + 1)}
    return [
        columns[row] if columns[row] < len(line) and line[columns[row]] > 0 else None
        for row, line in enumerate(weights)
    ]


def _augment(
    row: int,
    cost: Sequence[Sequence[float]],
    row_potential: list[float],
    column_potential: list[float],
    row_of: list[int],
    way: list[int],
) -> None:
    """Assign a column to ``row`` by moving others along the cheapest path."""
    size = len(cost) - 1
    row_of[0], column = row, 0
    slack, used = [float("inf")] * (size + 1), [False] * (size + 1)
    while row_of[column]:
        used[column] = True
        at, delta, nearest = row_of[column], float("inf"), 0
        for other in range(1, size + 1):
            if used[other]:
                continue
            reduced = cost[at][other] - row_potential[at] - column_potential[other]
            if reduced < slack[other]:
                slack[other], way[other] = reduced, column
            if slack[other] < delta:
                delta, nearest = slack[other], other
        for other in range(size + 1):
            if used[other]:
                row_potential[row_of[other]] += delta
                column_potential[other] -= delta
            else:
                slack[other] -= delta
        column = nearest
    while column:
        row_of[column] = row_of[way[column]]
        column = way[column]


def _unfinished(steps: Sequence[Step]) -> list[Step]:
    return list(steps[:-1]) if steps and steps[-1][0] == FINISH else list(steps)


class Similarity(Protocol):
    """A measure of text similarity."""

    @property
    def note(self) -> str:
        """The end of the evidence; empty for the published measure."""
        ...

    def matrix(self, rows: Sequence[str], columns: Sequence[str]) -> list[list[float]]:
        """Return the cosine of every row with every column, at least 0."""
        ...


class Words:
    """Cosine of word counts. A stand-in without a model, not comparable with published figures."""

    note = " (word counts stand in for sentence embeddings)"

    def matrix(self, rows: Sequence[str], columns: Sequence[str]) -> list[list[float]]:
        """See :class:`Similarity`."""
        counted = [_counted(text) for text in columns]
        return [[_cosine(row, column) for column in counted] for row in map(_counted, rows)]


class Sentences:
    """Cosine of sentence embeddings. T-Eval uses those of all-mpnet-base-v2.

    Args:
        folder: Folder of a sentence-transformers model, which is loaded on the CPU at the first comparison.

    Raises:
        MissingExtraError: At the first comparison, if sentence-transformers is not installed.
        ConfigError: At the first comparison, if the folder holds no model.
    """

    note = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model: Any = None
        self._lock = threading.Lock()

    def matrix(self, rows: Sequence[str], columns: Sequence[str]) -> list[list[float]]:
        """See :class:`Similarity`."""
        with self._lock:
            if self._model is None:
                self._model = _loaded(self._folder)
            vectors = self._model.encode(
                [*rows, *columns], normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True
            )
        first, second = vectors[: len(rows)], vectors[len(rows) :]
        # In single precision, equal texts are slightly below 1, but only 1 counts as right.
        return [[max(0.0, round(float(value), 6)) for value in line] for line in first @ second.T]


def _loaded(folder: Path) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise MissingExtraError("sentence-transformers", "dense") from None
    if not (folder / "modules.json").is_file():
        raise ConfigError(
            f"t_eval.embeddings: {folder} holds no sentence-transformers model (modules.json); expected the folder of all-mpnet-base-v2"
        )
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def _counted(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


def _cosine(first: Counter[str], other: Counter[str]) -> float:
    if not first and not other:
        return 1.0
    product = sum(count * other[word] for word, count in first.items())
    lengths = math.hypot(*first.values()) * math.hypot(*other.values())
    return product / lengths if lengths else 0.0
