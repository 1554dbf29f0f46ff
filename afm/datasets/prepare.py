"""Files the training engines read: alpaca JSON for LLaMA-Factory, parquet for verl."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec, PromptMode, PromptSource, PromptTemplate
from afm.datasets.held_out import HeldOut
from afm.datasets.schema import Task
from afm.datasets.spool import Spool
from afm.errors import ConfigError, DataError, MissingExtraError
from afm.runs.atomic import replace_text, replacing, replacing_together
from afm.runs.folder import sha256_of, write_manifest
from afm.tools.arguments import Reader, faults_of
from afm.trajectory.programs import CODE_TOOL
from afm.trajectory.record import Record
from afm.trajectory.types import Segment

_INFO_FILE = "dataset_info.json"
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
_BATCH_ROWS = 1_000
_INT_LIMIT = 1 << 63


class GoldForm(StrEnum):
    """How RL rows hold gold answers; our rewards read all three."""

    TEXT = "text"
    """A text: the answer itself, or JSON of ``{"target": [..]}`` or of the tests. Any kinds of rows fit in one file."""
    QUESTION = "question"
    """JSON of ``{"target": [..], "question": ..}``, as AFM's script writes it."""
    TARGET = "target"
    """An object ``{"target": [..]}``, as AFM's documentation says."""


def usual_gold(spec: AgentSpec) -> GoldForm:
    """As published: JSON of answers and question for agents that look answers up; plain text for those that compute them."""
    tools = set(spec.tool_roles.values())
    return GoldForm.QUESTION if tools and CODE_TOOL not in tools else GoldForm.TEXT


def write_sft(
    records: Iterable[Record],
    spec: AgentSpec,
    out_dir: str | Path,
    *,
    name: str,
    inputs: Iterable[Path] = (),
    readers: Mapping[str, Reader] | None = None,
) -> int:
    """Write kept trajectories as ``name.json`` (alpaca rows) and register it in ``dataset_info.json``.

    ``instruction`` is the whole user turn, ``output`` the whole response; the masks are found again from
    the text by the agent's declaration. Other entries of an existing ``dataset_info.json`` stay.

    Args:
        inputs: Files the records came from, for the manifest.
        readers: Of the tools' arguments; see :func:`afm.tools.arguments.faults_of`.

    Returns:
        The number of rows.

    Raises:
        DataError: A record belongs to another agent, is refused by ``spec`` or by a tool that it calls, or nothing is left.
    """
    check_name(name)
    out = Path(out_dir)
    target = out / f"{name}.json"
    rows = 0
    with replacing(target) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record in records:
            if record.kept:
                file.write("[\n" if rows == 0 else ",\n")
                file.write(json.dumps(_alpaca(record, spec, readers), ensure_ascii=False))
                rows += 1
        file.write("\n]\n")
        if rows == 0:
            raise DataError("no trajectory was kept, so there is nothing to train on", path=str(target))
    register(out, name, target.name)
    write_manifest(
        out / f"{name}.manifest.json",
        counts={"rows": rows},
        spec=spec,
        inputs=inputs,
        outputs={target.name: sha256_of(target)},
    )
    return rows


@dataclass(frozen=True, slots=True)
class RlPart:
    """Tasks that one agent works on.

    Attributes:
        spec: Whose prompt their rows get.
        ability: Value of the column of that name.
        prompt: Where their column ``prompt`` comes from; by default the row, or the agent where a row has none.
    """

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
        prompt: See :class:`RlPart`.

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

    Writes no manifest.

    Returns:
        Rows by file; the second file is absent where nothing was held out.

    Raises:
        DataError: As :func:`write_rl`.
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
    """Write the tasks of several agents as rows of one parquet file, in their order; see :func:`write_rl`.

    Raises:
        DataError: As :func:`write_rl`; ids must be unique over all parts.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "eval") from error
    ends: list[int] = []
    with Spool(path.parent, path) as spool:
        extras = _extra_columns(spool.filled(_noting_ends(parts, ends)))
        schema = _schema(
            pa, sorted({tool for part in parts for tool in part.spec.tool_roles.values()}), extras, gold
        )
        with replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
            for number, batch in enumerate(spool.batches(_BATCH_ROWS)):
                rows = []
                for place, task in enumerate(batch, number * _BATCH_ROWS):
                    part = parts[bisect_right(ends, place)]
                    rows.append(rl_row(task, part, extras, split=split, form=gold))
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return spool.rows


def _noting_ends(parts: Iterable[RlPart], ends: list[int]) -> Iterator[Task]:
    """The tasks of all parts; ``ends`` gets the number of tasks up to the end of each."""
    count = 0
    for part in parts:
        for task in part.tasks:
            count += 1
            yield task
        ends.append(count)


def rl_row(
    task: Task,
    part: RlPart,
    extras: Mapping[str, str],
    *,
    split: str,
    form: GoldForm = GoldForm.TEXT,
) -> dict[str, Any]:
    """One parquet row, with the task's own prompt if it came with one, else the agent's; ``extras`` names the further columns of ``extra_info`` and their types.

    Raises:
        DataError: The task has no answers, and ``form`` needs them; or no prompt, and ``part`` wants the rows'.
    """
    spec, ability = part.spec, part.ability
    gold = _gold(task, form)
    create = {"ground_truth": gold, "question": task.question, "data_source": task.data_source}
    further = {key: _cell(task.extra_info.get(key), kind) for key, kind in extras.items()}
    return {
        "data_source": task.data_source,
        "prompt": _chat(task, part),
        "ability": task.ability or ability,
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


def _alpaca(record: Record, spec: AgentSpec, readers: Mapping[str, Reader] | None) -> dict[str, str]:
    if record.agent != spec.name:
        raise DataError(f"record {record.id!r} belongs to agent {record.agent!r}, expected {spec.name!r}")
    segments = [Segment(part.author, part.text) for part in record.segments]
    issues = faults_of(segments, spec, readers=readers)
    if issues:
        raise DataError(f"record {record.id!r} breaks the rules of agent {spec.name!r}: {issues[0]}")
    return {"instruction": spec.user_message(record.question), "input": "", "output": record.text}


def check_name(name: str) -> None:
    """Check the name of a data set, which becomes a file's.

    Raises:
        DataError: It could lead out of the folder.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name):
        raise DataError(
            f"data set name {name!r}: expected letters, digits, `_`, `-` and `.`, without a folder"
        )


def register(
    folder: Path,
    name: str,
    file_name: str,
    columns: Mapping[str, str] = COLUMNS,
    formatting: str | None = None,
) -> None:
    """Enter a file in the ``dataset_info.json`` of its folder; other entries stay.

    Args:
        formatting: Layout of its rows; ``None`` is alpaca.

    Raises:
        ConfigError: That file is broken.
    """
    info_file = folder / _INFO_FILE
    known: dict[str, Any] = {}
    if info_file.exists():
        try:
            known = json.loads(info_file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{info_file}: no JSON: {error}; repair or remove it") from None
    layout = {"formatting": formatting} if formatting else {}
    known[name] = {"file_name": file_name, **layout, "columns": dict(columns)}
    replace_text(info_file, json.dumps(known, indent=2, ensure_ascii=False) + "\n")


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
