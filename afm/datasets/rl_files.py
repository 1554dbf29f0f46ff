"""Parquet rows for `afm rl`, and the questions held out of them."""

from __future__ import annotations

import hashlib
import heapq
import json
import pickle
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from afm.agents import AgentSpec, PromptMode, PromptSource, PromptTemplate
from afm.datasets.schema import GoldForm, Task, check_writable
from afm.errors import DataError, MissingExtraError
from afm.runs.atomic import replacing, replacing_together
from afm.runs.folder import sha256_of, write_manifest
from afm.trajectory.programs import CODE_TOOL

_BATCH_ROWS = 1_000
_INT_LIMIT = 1 << 63
_ID_KEY_BYTES = 12
_LARGEST_SHARE = 10
"""One question in so many is held out at most."""


def usual_gold(spec: AgentSpec) -> GoldForm:
    """As published: JSON of answers and question for agents that look answers up; plain text for those that compute them."""
    tools = set(spec.tool_roles.values())
    return GoldForm.QUESTION if tools and CODE_TOOL not in tools else GoldForm.TEXT


@dataclass(frozen=True, slots=True)
class RlPart:
    """Tasks that one agent works on; their column ``prompt`` comes from the row or, where a row has none, from the agent."""

    tasks: Iterable[Task]
    spec: AgentSpec
    ability: str
    prompt: PromptSource | None = None


def write_rl(
    tasks: Iterable[Task],
    spec: AgentSpec,
    path: str | Path,
    *,
    split: str = "train",
    ability: str = "math",
    gold: GoldForm | None = None,
    inputs: Iterable[Path] = (),
    prompt: PromptSource | None = None,
) -> int:
    """Write tasks as the parquet rows of AFM's RL data (``prompt``, ``reward_model``, ``extra_info`` ..).

    ``extra_info.index`` is the task's id. Ground truths that are no strings are stored as JSON.
    Further values of ``task.extra_info`` become columns of ``extra_info``. The tasks are read once and laid aside on disk, since
    their columns depend on all of them; memory holds a group of rows and a key a task.

    Args:
        ability: Of tasks that name none.
        gold: How ``ground_truth`` is held; by default :func:`usual_gold`.

    Raises:
        DataError: No tasks, an id that occurs twice (its samples would share a group), or a task without answers in a
            form that needs them.
    """
    target = Path(path)
    part = RlPart(tasks, spec, ability, prompt)
    rows = write_rl_parts([part], target, split=split, gold=gold or usual_gold(spec))
    note_rl(target, rows, spec, inputs=inputs, split=split)
    return rows


def write_rl_held_out(
    part: RlPart,
    path: Path,
    held: HeldOut,
    *,
    name: str = "val",
    split: str = "train",
    gold: GoldForm | None = None,
) -> dict[Path, int]:
    """As :func:`write_rl`, with the questions of ``held`` in ``NAME.parquet`` beside ``path``; both appear together.

    Writes no manifest. Returns the rows by file; the second file is absent where nothing was held out.
    """
    others, form = path.with_name(f"{name}.parquet"), gold or usual_gold(part.spec)
    with replacing_together([path, others]) as (first, second):
        trained = replace(part, tasks=held.split(part.tasks))
        rows = {path: write_rl_parts([trained], first, split=split, gold=form)}
        if held.tasks:
            tested = replace(part, tasks=held.tasks)
            rows[others] = write_rl_parts([tested], second, split=name, gold=form)
    return rows


def note_rl(path: Path, rows: int, spec: AgentSpec, *, inputs: Iterable[Path], split: str) -> None:
    """The manifest of one parquet file."""
    write_manifest(
        path.with_name(f"{path.name}.manifest.json"),
        counts={"rows": rows},
        spec=spec,
        inputs=inputs,
        split=split,
        outputs={path.name: sha256_of(path)},
    )


def write_rl_parts(
    parts: Sequence[RlPart], path: Path, *, split: str = "train", gold: GoldForm = GoldForm.TEXT
) -> int:
    """As :func:`write_rl`, for the tasks of several agents in one file; ids must be unique over all parts."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "eval") from error
    ends: list[int] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent) as file:
        spool = _Spool(file, path)
        extras = _extra_columns(spool.filled(_chain_parts(parts, ends)))
        schema = _schema(
            pa, sorted({tool for part in parts for tool in part.spec.tool_roles.values()}), extras, gold
        )
        with replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
            for number, batch in enumerate(spool.batches(_BATCH_ROWS)):
                rows = []
                for place, task in enumerate(batch, number * _BATCH_ROWS):
                    part = parts[bisect_right(ends, place)]
                    rows.append(_row(task, part, extras, split, gold))
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return spool.rows


def _chain_parts(parts: Iterable[RlPart], ends: list[int]) -> Iterator[Task]:
    """The tasks of all parts; ``ends`` gets the number of tasks up to the end of each."""
    count = 0
    for part in parts:
        for task in part.tasks:
            count += 1
            yield task
        ends.append(count)


def _row(task: Task, part: RlPart, extras: Mapping[str, str], split: str, form: GoldForm) -> dict[str, Any]:
    """One parquet row; ``extras`` names the further columns of ``extra_info`` and their types."""
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
            f"task {task.id!r} has no answers for the ground truth form {form.value!r}; use 'text'"
        )
    if form is GoldForm.TARGET:
        return {"target": answers}
    return json.dumps({"target": answers, "question": task.question}, ensure_ascii=False)


def gold_text(ground_truth: Any) -> str:
    """A ground truth as one string: plain when it is one, else JSON of ``{"target": [..]}`` or the mapping."""
    if isinstance(ground_truth, str):
        return ground_truth
    if isinstance(ground_truth, list | tuple):
        ground_truth = {"target": list(ground_truth)}
    return json.dumps(ground_truth, ensure_ascii=False)


def answers_of(ground_truth: Any) -> list[str]:
    """The acceptable answers of a ground truth; none for test cases."""
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target", [])
    return [ground_truth] if isinstance(ground_truth, str) else [str(item) for item in ground_truth or ()]


_OWN_KEYS = frozenset({"index", "split", "question", "answer", "need_tools_kwargs", "tools_kwargs"})


def _extra_columns(tasks: Iterable[Task]) -> dict[str, str]:
    """Type of every further column: one of bool, int, float, str; ``json`` where rows disagree."""
    kinds: dict[str, str] = {}
    for key, value in _extras(tasks):
        fits = isinstance(value, bool | float | str) or (isinstance(value, int) and abs(value) < _INT_LIMIT)
        kind = type(value).__name__ if fits else "json"
        known = kinds.setdefault(key, kind)
        if known != kind:
            kinds[key] = "float" if {known, kind} == {"int", "float"} else "json"
    return kinds


def _extras(tasks: Iterable[Task]) -> Iterator[tuple[str, Any]]:
    for task in tasks:
        for key, value in task.extra_info.items():
            if key not in _OWN_KEYS and value is not None:
                yield key, value


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
    """Tasks laid aside in a file, so that something is known of all before the first is written; memory holds a key of each.

    Args:
        path: What they are for, in errors.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.rows = 0
        self._file = file
        self._path = path

    def filled(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Lay every task aside and hand it on.

        Raises:
            DataError: An id occurs twice, a task may not be written in plain form, or there is none.
        """
        seen: set[bytes] = set()
        for task in tasks:
            check_writable(task)
            name = task.id.encode("utf-8", "surrogatepass")
            key = hashlib.blake2b(name, digest_size=_ID_KEY_BYTES).digest()
            if key in seen:
                raise DataError(f"task id {task.id!r} occurs twice; ids must be unique", path=str(self._path))
            seen.add(key)
            pickle.dump(task, self._file, pickle.HIGHEST_PROTOCOL)
            self.rows += 1
            yield task
        if not self.rows:
            raise DataError("no tasks to write", path=str(self._path))

    def batches(self, size: int) -> Iterator[list[Task]]:
        """All of them in their order, ``size`` at a time."""
        self._file.seek(0)
        for begin in range(0, self.rows, size):
            count = min(size, self.rows - begin)
            yield [pickle.load(self._file) for _ in range(count)]  # written by this very object


class HeldOut:
    """Takes questions out of a stream; memory holds those alone.

    The questions with the smallest hashes are taken: whatever the order of the rows, the same ones. Rows with one text are
    one question.

    Args:
        count: Questions to take, at most a tenth of all, and at least one.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._groups: dict[int, list[Task]] = {}
        self._largest: list[int] = []

    @property
    def tasks(self) -> list[Task]:
        """What was taken, in the order of the hashes."""
        return [task for key in sorted(self._groups) for task in self._groups[key]]

    def split(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield what stays; :attr:`tasks` is complete when this has ended."""
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
        yield from self._returned(max(1, seen // _LARGEST_SHARE) if seen > 1 else 0)

    def _returned(self, most: int) -> Iterator[Task]:
        """Give back the largest until ``most`` are left; rows of one text go together, so nothing is in both parts."""
        while len(self._groups) > most:
            yield from self._groups.pop(-heapq.heappop(self._largest))

    def _key(self, task: Task) -> int:
        text = f"{self._seed}\n{' '.join(task.question.split())}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
