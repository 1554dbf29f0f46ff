"""One question with its gold answer, and the readers of every row layout that the framework accepts.

Layouts: our own JSONL, raw QA rows ``{question, answer, data_source}``, and AFM's published RL parquet rows with a prompt
(``prompt``, ``reward_model.ground_truth``, ``extra_info``).
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from afm.agents.prompt_source import QUESTION_MARK, row_messages
from afm.datasets.row_files import published_rows
from afm.errors import DataError, first_fault, json_word, no_such_file, with_path
from afm.runs.atomic import replacing
from afm.trajectory.chat import row_id
from afm.trajectory.io import json_rows
from afm.trajectory.record import SEALING_KEY, FrozenModel

_GOLD_KEYS = ("ground_truth", "answer")
_RESULT = re.compile(r"(?:^|\n)#### *\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*\Z")
_KNOWN_KEYS = {
    *_GOLD_KEYS,
    "question",
    "prompt",
    "id",
    "data_source",
    "ability",
    "extra_info",
    "reward_model",
}
_WORKED_SOURCES = ("gsm8k", "openai/gsm8k")
"""Data sources whose published ``answer`` is a worked solution."""
_NO_JSON = (".parquet", ".csv", ".tsv")
_MOST_LEVELS = 64
"""Maximum nesting of lists and objects. Buffering rows recurses, and no published row comes near."""


class Task(FrozenModel):
    """One question to work on."""

    id: str = Field(min_length=1)
    """The id, unique within its file."""
    question: str = Field(min_length=1)
    ground_truth: Any = None
    """A string, a list of strings, or a mapping (``{"target": [..]}``, test cases)."""
    data_source: str = ""
    """The data source, which chooses the reward, and the agent if rows choose one."""
    ability: str = ""
    """The row's column ``ability`` (``math``, ``code`` ..), if it has one."""
    extra_info: dict[str, Any] = Field(default_factory=dict)
    """Other values of the row (steps, split, starter code)."""
    prompt: tuple[dict[str, str], ...] | None = None
    """The row's own prompt as a chat, used by runs with ``prompt: row``."""

    def __init__(self, **fields: Any) -> None:
        """Check the fields.

        Raises:
            DataError: A field is missing, unknown, or has a wrong value.
        """
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise DataError(f"task: {first_fault(error)}; expected Task(id=..., question=...)") from None

    @model_serializer(mode="wrap")
    def _without_absent_columns(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out prompt and ability if absent, so that files and digests without these keys stay the same."""
        data: dict[str, Any] = dump(self)
        for key in ("ability", "prompt"):
            if not data.get(key):
                data.pop(key, None)
        return data


def read_tasks(path: str | Path, *, data_source: str | None = None) -> Iterator[Task]:
    """Stream the tasks of a JSONL, CSV, TSV or parquet file.

    Args:
        path: ``*.parquet``, ``*.csv``, ``*.tsv``, or any other name for JSONL (blank lines are skipped).
        data_source: Data source of rows without one.

    Raises:
        DataError: At the first bad row, with file and line (parquet: row, counted from 1).
    """
    return (task for _, task in numbered_tasks(path, data_source=data_source))


def numbered_tasks(path: str | Path, *, data_source: str | None = None) -> Iterator[tuple[int, Task]]:
    """Stream tasks as :func:`read_tasks` does, each with its line."""
    for number, item in _numbered_items(Path(path), data_source):
        if isinstance(item, DataError):
            raise item
        yield number, item


def read_task_files(paths: Iterable[str | Path]) -> Iterator[Task]:
    """Stream the tasks of several files as one. An id that occurs in two files is an error that names both places."""
    places: dict[str, str] = {}
    for path in map(Path, paths):
        for number, task in numbered_tasks(path):
            if task.id in places:
                raise DataError(
                    f"task id {task.id!r} is at {places[task.id]} too; ids must be unique over all files: "
                    "give the rows of one of them other ids, or select from each file on its own",
                    path=str(path),
                    line=number,
                )
            places[task.id] = f"{path}:{number}"
            yield task


def scan_tasks(path: str | Path, *, data_source: str | None = None) -> Iterator[Task | DataError]:
    """Stream tasks as :func:`read_tasks` does, but yield each bad row as a :class:`DataError` and continue.

    Raises:
        DataError: The file is missing, or cannot be read as a whole.
    """
    return (item for _, item in _numbered_items(Path(path), data_source))


def _numbered_items(file: Path, data_source: str | None) -> Iterator[tuple[int, Task | DataError]]:
    if not file.is_file():
        expected = "expected tasks as .jsonl, .csv, .tsv or .parquet"
        raise DataError(f"{no_such_file(file)}; {expected}", path=str(file))
    rows = published_rows(file) if file.suffix in _NO_JSON else json_rows(file)
    seen: set[str] = set()
    for number, row in rows:
        try:
            if isinstance(row, DataError):
                raise row
            if not isinstance(row, Mapping):
                raise DataError(f"expected a JSON object, got {json_word(row)}")
            task = task_of_row(row, default_id=f"{file.stem}-{number}", data_source=data_source)
            if task.id in seen:
                raise DataError(f"id {task.id!r} was used by an earlier row; ids must be unique")
        except DataError as error:
            yield number, DataError(with_path(error.message, file), path=str(file), line=number)
            continue
        seen.add(task.id)
        yield number, task


def task_of_row(row: Mapping[str, Any], *, default_id: str, data_source: str | None = None) -> Task:
    """Read one row of any known layout. A bad row raises a :class:`DataError` without location."""
    info = _mapping(row, "extra_info")
    question = row.get("question") or info.get("question") or _question_of_prompt(row)
    if not isinstance(question, str) or not question.strip():
        got = repr(question) if question else f"the columns {', '.join(map(repr, row)) or 'none'}"
        raise DataError(
            f"expected `question` (or `prompt`) as a non-empty string, got {got}{_other_keys(row)}"
        )
    source = _text(row, "data_source") or data_source or ""
    return Task(
        id=row_id(row) or row_id(info, "index") or default_id,
        question=question,
        ground_truth=_result(_gold(row), source),
        data_source=source,
        ability=_text(row, "ability") or "",
        extra_info={
            key: plain_value(value, f"extra_info.{key}") for key, value in info.items() if value is not None
        },
        prompt=row_messages(row.get("prompt")),
    )


def _other_keys(row: Mapping[str, Any]) -> str:
    """Name the command that reads a row with other keys. It has the row's own keys if nothing else can be meant."""
    key, value = next(iter(row.items())) if len(row) == 1 else ("", None)
    items = value if isinstance(value, list) else []
    if items and all(isinstance(item, Mapping) and "role" not in item for item in items):
        return f"; if {key!r} holds the rows, write them to a file of their own: jq .{key} FILE > rows.json"
    free = [key for key in row if key not in _KNOWN_KEYS]
    question = ["question"] if "question" in row else []
    gold = [key for key in _GOLD_KEYS if key in row][:1]
    if len(free) == 2 - len(question) - len(gold):
        question = question or [free.pop(0)]
        gold = gold or free
    keys = shlex.join(["--question-key", *(question or ["KEY"]), "--answer-key", *(gold or ["KEY"])])
    return f"; `afm data prepare tasks FILE {keys} --out tasks.jsonl` reads rows with other keys"


def write_tasks(tasks: Iterable[Task], path: str | Path) -> int:
    """Write tasks as JSONL, one line each, and return their number. ``path`` is replaced when all are written."""
    count = 0
    with replacing(Path(path)) as temporary, temporary.open("w", encoding="utf-8") as file:
        for task in tasks:
            check_writable(task)
            file.write(task.model_dump_json() + "\n")
            count += 1
    return count


def check_writable(task: Task) -> None:
    """Raise an error for a task that its owner publishes encrypted (see :mod:`afm.trajectory.record`)."""
    if SEALING_KEY in task.extra_info:
        raise DataError(
            f"task {task.id!r} of {task.data_source} is published encrypted and is not written in plain form; "
            f"evaluate the encrypted file itself: afm eval configs/eval/{task.data_source}.yaml data=FILE"
        )


def solution_result(solution: str) -> str | None:
    """Return the number after ``####`` in the last line of a GSM8K solution, without thousands separators, if any."""
    match = _RESULT.search(solution)
    return match[1].replace(",", "") if match else None


def question_of_prompt(prompt: str) -> str:
    """Return the text after the last line that begins with ``Task:`` or ``Question:``, else the whole prompt."""
    marks = list(QUESTION_MARK.finditer(prompt))
    return prompt[marks[-1].end() :].strip() if marks else prompt.strip()


UNCLEAR_QUESTION = (
    "the row has no `question`, and several lines of its prompt begin with Question: or Task:, so the question may be "
    "incomplete; add extra_info.question, or set prompt=row"
)


def question_is_unclear(row: Mapping[str, Any]) -> bool:
    """Return whether only a row's prompt contains its question, and the question could begin at several lines."""
    chat = row_messages(row.get("prompt"))
    if chat is None or row.get("question") or (row.get("extra_info") or {}).get("question"):
        return False
    return len(QUESTION_MARK.findall(chat[-1]["content"])) > 1


def _question_of_prompt(row: Mapping[str, Any]) -> str | None:
    prompt = row.get("prompt")
    if prompt is None:
        return None
    if isinstance(prompt, str):
        return question_of_prompt(prompt)
    try:
        asked = [message["content"] for message in prompt if message["role"] == "user"]
        return question_of_prompt(asked[-1])
    except (TypeError, KeyError, IndexError):
        raise DataError(f"`prompt`: expected [{{role: user, content}}], got {str(prompt)[:80]!r}") from None


def _gold(row: Mapping[str, Any]) -> Any:
    model = _mapping(row, "reward_model")
    places = [row.get(key) for key in _GOLD_KEYS] + [model.get("ground_truth")]
    values = [value for value in places if value is not None]
    if not values:
        raise DataError(
            "expected `answer`, `ground_truth` or `reward_model.ground_truth`, got none" + _other_keys(row)
        )
    gold = checked_gold(values[0], "answer")
    if isinstance(gold, str) and not gold.strip():
        raise DataError("the answer is empty; fill it in, or remove the row")
    if isinstance(gold, Mapping):
        return {key: value for key, value in gold.items() if value is not None}
    if isinstance(gold, bool | int | float):
        return str(gold)
    return _decoded(gold) if isinstance(gold, str) else gold


def _result(gold: Any, source: str) -> Any:
    """Return the gold answer. In a row of GSM8K that is read without its reader, it is the end of the worked solution."""
    if isinstance(gold, str) and source.lower() in _WORKED_SOURCES:
        return solution_result(gold) or gold
    return gold


def _decoded(gold: str) -> Any:
    """Parse JSON objects into mappings. Any other text is the answer itself.

    Lists stay text, because ``[1, 2]`` is an interval in a math row, not two alternatives.
    """
    if not gold.lstrip().startswith("{"):
        return gold
    try:
        return json.loads(gold)
    except json.JSONDecodeError:
        return gold


def _mapping(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"`{key}`: expected a mapping, got {json_word(value)}")
    return value


def _text(row: Mapping[str, Any], key: str) -> str | None:
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise DataError(f"`{key}`: expected a string, got {value!r}")
    return value


def plain_value(value: Any, name: str, level: int = 0) -> Any:
    """Convert ``value`` to JSON data. Dates, times and decimals become text. Bytes and deep nesting are errors."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        raise DataError(f"`{name}`: bytes, expected texts, numbers, lists and objects")
    if level == _MOST_LEVELS:
        raise DataError(f"`{name}`: more than {_MOST_LEVELS} levels of lists and objects")
    if isinstance(value, Mapping):
        return {key: plain_value(item, name, level + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, name, level + 1) for item in value]
    return value


def checked_gold(value: Any, name: str) -> Any:
    """Convert a gold answer as :func:`plain_value` does. NaN and infinity, as from a gap in a table, are errors."""
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"`{name}`: expected an answer, got {value}")
    return plain_value(value, name)
