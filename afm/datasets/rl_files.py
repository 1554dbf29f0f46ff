"""Parquet rows for `afm rl`, and the questions held out for validation."""

from __future__ import annotations

import hashlib
import heapq
import json
import pickle
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from afm.agents import AgentSpec, PromptMode, PromptSource, PromptTemplate
from afm.choices import GoldForm
from afm.datasets.hub_sets import Validation
from afm.datasets.schema import Task, check_writable
from afm.errors import DataError, MissingExtraError
from afm.runs.atomic import replacing, replacing_together
from afm.runs.folder import sha256_of, write_manifest
from afm.trajectory.programs import CODE_TOOL

_BATCH_ROWS = 1_000
_INT_LIMIT = 1 << 63
_ID_KEY_BYTES = 12
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_LARGEST_SHARE = 10
"""At most one in this number of questions is held out."""


def usual_gold(spec: AgentSpec) -> GoldForm:
    """Return the published form: JSON of answers and question for agents that search, plain text for those that compute."""
    tools = set(spec.tool_roles.values())
    return GoldForm.QUESTION if tools and CODE_TOOL not in tools else GoldForm.TEXT


@dataclass(frozen=True, slots=True)
class RlPart:
    """Tasks for one agent. The column ``prompt`` comes from the row, or from the agent if the row has no prompt."""

    tasks: Iterable[Task]
    spec: AgentSpec
    ability: str
    prompt: PromptSource | None = None


def write_rl(
    tasks: Iterable[Task],
    spec: AgentSpec,
    path: Path,
    *,
    split: str = "train",
    ability: str = "math",
    gold: GoldForm | None = None,
    inputs: Iterable[Path] = (),
    prompt: PromptSource | None = None,
    validation: Validation | None = None,
) -> dict[Path, int]:
    """Write the tasks of one agent with :func:`write_rl_parts`, and a manifest next to each file.

    Args:
        ability: Ability of tasks without one.
        gold: Form of ``ground_truth``. By default that of :func:`usual_gold`.
    """
    part = RlPart(tasks, spec, ability, prompt)
    rows = write_rl_parts([part], path, split=split, gold=gold or usual_gold(spec), validation=validation)
    for file, count in rows.items():
        write_manifest(
            file.with_name(f"{file.name}.manifest.json"),
            counts={"rows": count},
            spec=spec,
            inputs=inputs,
            split=split if file == path else file.stem,
            outputs={file.name: sha256_of(file)},
        )
    return rows


def write_rl_parts(
    parts: Sequence[RlPart],
    path: Path,
    *,
    split: str = "train",
    gold: GoldForm = GoldForm.TEXT,
    validation: Validation | None = None,
) -> dict[Path, int]:
    """Write the tasks of one or more agents as the parquet rows of AFM's RL data.

    ``extra_info.index`` is the task's id. Ground truths that are not strings are stored as JSON. Other values of
    ``task.extra_info`` become columns of ``extra_info``. The tasks are read once and buffered on disk, because the columns
    depend on all of them. Memory holds a group of rows and one key per task.

    Args:
        validation: Questions to hold out of every part, in a file next to ``path``. Both files appear together.

    Returns:
        The number of rows by file. The second file is absent if nothing is held out.

    Raises:
        DataError: There are no tasks, an id occurs twice (its samples would share a group), or a task has no answers for a
            form that needs them.
    """
    parts = [replace(part, tasks=_checked(part, gold)) for part in parts]
    if validation is None:
        return {path: _write_parquet(parts, path, split, gold)}
    others = path.with_name(f"{validation.name}.parquet")
    count = -(-validation.rows // len(parts))
    held = [HeldOut(count, validation.seed, any_numbers=validation.any_numbers) for _ in parts]
    with replacing_together([path, others]) as (first, second):
        trained = [replace(part, tasks=own.split(part.tasks)) for part, own in zip(parts, held, strict=True)]
        rows = {path: _write_parquet(trained, first, split, gold)}
        tested = [replace(part, tasks=own.tasks) for part, own in zip(parts, held, strict=True)]
        if any(part.tasks for part in tested):
            rows[others] = _write_parquet(tested, second, validation.name, gold)
    return rows


def _write_parquet(parts: Sequence[RlPart], path: Path, split: str, gold: GoldForm) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "eval") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent) as file:
        spool = _Spool(file, path)
        extras = _extra_columns(spool.fill(parts))
        tools = sorted({tool for part in parts for tool in part.spec.tool_roles.values()})
        schema = _schema(pa, tools, extras, gold)
        with replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
            for batch in spool.batches(_BATCH_ROWS):
                rows = [_row(task, parts[number], extras, split, gold) for number, task in batch]
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return spool.rows


def _checked(part: RlPart, form: GoldForm) -> Iterator[Task]:
    """Yield the tasks. A task that cannot become a row raises here, while the reader of its file knows the line."""
    for task in part.tasks:
        check_writable(task)
        _gold(task, form)
        _chat(task, part)
        yield task


def _row(task: Task, part: RlPart, extras: Mapping[str, str], split: str, form: GoldForm) -> dict[str, Any]:
    """Return one parquet row. ``extras`` names the other columns of ``extra_info`` and their types."""
    spec, gold = part.spec, _gold(task, form)
    create = {"ground_truth": gold, "question": task.question, "data_source": task.data_source}
    further = {key: _cell(task.extra_info.get(key), kind) for key, kind in extras.items()}
    return {
        "data_source": task.data_source,
        "prompt": _chat(task, part),
        "ability": task.ability or part.ability,
        "reward_model": {"ground_truth": gold, "style": "rule"},
        "extra_info": {
            **further,
            "index": task.id,
            "split": split,
            "question": task.question,
            "answer": answers_of(task.ground_truth),
            "need_tools_kwargs": bool(spec.tool_roles),
            "tools_kwargs": {
                tool: {"create_kwargs": create} for tool in sorted(set(spec.tool_roles.values()))
            },
        },
    }


def _chat(task: Task, part: RlPart) -> list[dict[str, str]]:
    source = part.prompt or PromptSource(PromptMode.ROW, PromptTemplate.of_agent(part.spec))
    try:
        return source.messages(part.spec, task.question, task.prompt)
    except DataError as error:
        raise DataError(f"task {task.id!r}: {error.message}") from None


def _gold(task: Task, form: GoldForm) -> str | dict[str, list[str]]:
    if form is GoldForm.TEXT:
        return gold_text(task.ground_truth)
    answers = answers_of(task.ground_truth)
    if not answers:
        raise DataError(
            f"task {task.id!r} has no answers for the ground truth form {form.value!r}; use --ground-truth text"
        )
    if form is GoldForm.TARGET:
        return {"target": answers}
    return json.dumps({"target": answers, "question": task.question}, ensure_ascii=False)


def gold_text(ground_truth: Any) -> str:
    """Return a ground truth as one string: itself if it is a string, else JSON of ``{"target": [..]}`` or the mapping."""
    if isinstance(ground_truth, str):
        return ground_truth
    if isinstance(ground_truth, list | tuple):
        ground_truth = {"target": list(ground_truth)}
    return json.dumps(ground_truth, ensure_ascii=False)


def answers_of(ground_truth: Any) -> list[str]:
    """Return the accepted answers of a ground truth. Empty for test cases."""
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target", [])
    return [ground_truth] if isinstance(ground_truth, str) else [str(item) for item in ground_truth or ()]


_OWN_KEYS = frozenset({"index", "split", "question", "answer", "need_tools_kwargs", "tools_kwargs"})


def _extra_columns(tasks: Iterable[Task]) -> dict[str, str]:
    """Return the type of every other column: bool, int, float or str, or ``json`` if rows disagree."""
    kinds: dict[str, str] = {}
    for key, value in (item for task in tasks for item in task.extra_info.items()):
        if key in _OWN_KEYS or value is None:
            continue
        fits = isinstance(value, bool | float | str) or (isinstance(value, int) and abs(value) < _INT_LIMIT)
        kind = type(value).__name__ if fits else "json"
        known = kinds.setdefault(key, kind)
        if known != kind:
            kinds[key] = "float" if {known, kind} == {"int", "float"} else "json"
    return kinds


def _cell(value: Any, kind: str) -> Any:
    return json.dumps(value, ensure_ascii=False) if kind == "json" and value is not None else value


def _schema(pa: Any, tool_names: Sequence[str], extras: Mapping[str, str], form: GoldForm) -> Any:
    text = pa.string()
    gold = pa.struct([("target", pa.list_(text))]) if form is GoldForm.TARGET else text
    types = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "str": text, "json": text}
    create = pa.struct([("ground_truth", gold), ("question", text), ("data_source", text)])
    tool = pa.struct([("create_kwargs", create)])
    info = [
        *((key, types[kind]) for key, kind in extras.items()),
        ("index", text),
        ("split", text),
        ("question", text),
        ("answer", pa.list_(text)),
        ("need_tools_kwargs", pa.bool_()),
    ]
    if tool_names:
        tools = [(name, tool) for name in tool_names]
        info.append(("tools_kwargs", pa.struct(tools)))
    message = pa.struct([("role", text), ("content", text)])
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(message)),
            ("ability", text),
            ("reward_model", pa.struct([("ground_truth", gold), ("style", text)])),
            ("extra_info", pa.struct(info)),
        ]
    )


class _Spool:
    """Tasks buffered in a file until the columns of all are known. Memory holds one key per task.

    Args:
        path: The output file, for errors.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.rows = 0
        self._file = file
        self._path = path

    def fill(self, parts: Iterable[RlPart]) -> Iterator[Task]:
        """Buffer every task and yield it.

        Raises:
            DataError: An id occurs twice, or no task is left.
        """
        seen: set[bytes] = set()
        for number, task in ((number, task) for number, part in enumerate(parts) for task in part.tasks):
            name = task.id.encode("utf-8", "surrogatepass")
            key = hashlib.blake2b(name, digest_size=_ID_KEY_BYTES).digest()
            if key in seen:
                raise DataError(f"task id {task.id!r} occurs twice; ids must be unique", path=str(self._path))
            seen.add(key)
            pickle.dump((number, task), self._file, pickle.HIGHEST_PROTOCOL)
            self.rows += 1
            yield task
        if not self.rows:
            raise DataError("no tasks to write", path=str(self._path))

    def batches(self, size: int) -> Iterator[list[tuple[int, Task]]]:
        """Yield all tasks in order with the numbers of their parts, ``size`` at a time."""
        self._file.seek(0)
        for begin in range(0, self.rows, size):
            count = min(size, self.rows - begin)
            yield [pickle.load(self._file) for _ in range(count)]  # safe: this object wrote the file


def most_held_out(rows: int) -> int:
    """Return the largest number of questions that may be held out of a file with ``rows`` rows."""
    return max(1, rows // _LARGEST_SHARE) if rows > 1 else 0


class HeldOut:
    """Takes questions out of a stream. Memory holds only these questions.

    The questions with the smallest hashes are taken, so the order of the rows does not matter. Rows with the same text are
    one question.

    Args:
        count: Number of questions to take, at most a tenth of all, and at least one.
        any_numbers: Whether rows whose texts differ only in numbers are one question.
    """

    def __init__(self, count: int, seed: int, *, any_numbers: bool = False) -> None:
        self._count = count
        self._seed = seed
        self._any_numbers = any_numbers
        self._groups: dict[int, list[Task]] = {}
        self._largest: list[int] = []

    @property
    def tasks(self) -> list[Task]:
        """The held-out tasks in the order of the hashes."""
        return [task for key in sorted(self._groups) for task in self._groups[key]]

    def split(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield the tasks that stay. :attr:`tasks` is complete at the end."""
        seen = 0
        for task in tasks:
            seen += 1
            key = self._key(task)
            if key in self._groups:
                self._groups[key].append(task)
                continue
            if len(self._groups) == self._count and key > -self._largest[0]:
                yield task
                continue
            self._groups[key] = [task]
            heapq.heappush(self._largest, -key)
            yield from self._returned(self._count)
        yield from self._returned(most_held_out(seen))

    def _returned(self, most: int) -> Iterator[Task]:
        """Yield the groups with the largest hashes until ``most`` are left. Rows of one text stay together."""
        while len(self._groups) > most:
            yield from self._groups.pop(-heapq.heappop(self._largest))

    def _key(self, task: Task) -> int:
        words = " ".join(task.question.split())
        words = _NUMBER.sub("0", words.lower()) if self._any_numbers else words
        text = f"{self._seed}\n{words}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
