"""The rows of an RL parquet as a run will use them: readable, told apart, judged by something, asked of the right agent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec
from afm.datasets import Task
from afm.datasets.schema import task_of_row
from afm.errors import AfmError, ConfigError, DataError
from afm.planning import Finding, Level
from afm.rewards.sources import BY_SOURCE, checked_name, scorer_name
from verl_ext.compose import AGENT_LOOP_NAME

_LISTED = 3
_LONGEST = 256
"""Questions, the longest by characters, whose prompts are counted in tokens."""
_JUDGED = 64
_BATCH_ROWS = 256
_INDEX = "extra_info.index"


@dataclass(slots=True)
class Rows:
    """What was found in some files.

    Attributes:
        count: Rows, bad ones included.
        good: Rows that can be trained on.
        scorers: Rows by what judges them.
        longest: The longest questions.
        judged: Some of the rows that a model judges.
    """

    count: int = 0
    good: int = 0
    scorers: Counter[str] = field(default_factory=Counter)
    longest: list[Task] = field(default_factory=list)
    judged: list[Task] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    bad_count: int = 0
    unnamed: int = 0
    repeated: list[str] = field(default_factory=list)
    repeated_count: int = 0
    foreign: Counter[str] = field(default_factory=Counter)
    unjudged: dict[str, str] = field(default_factory=dict)
    other_prompts: int = 0
    seen: dict[str, str] = field(default_factory=dict)


def read_rows(files: Sequence[str], spec: AgentSpec, by_source: Mapping[str, str]) -> Rows:
    """Every row of the files, read as the agent loop reads it.

    Raises:
        ConfigError: A file is missing or no parquet.
    """
    rows = Rows()
    table = BY_SOURCE | {source.lower(): name for source, name in by_source.items()}
    for file in files:
        for number, row in enumerate(_rows_of(Path(file)), 1):
            rows.count += 1
            place = f"{Path(file).name}:{number}"
            try:
                task = task_of_row(row, default_id=place)
            except DataError as error:
                rows.bad_count += 1
                rows.bad += [f"{place}: {error.message}"] if len(rows.bad) < _LISTED else []
                continue
            rows.good += 1
            _note(rows, row, task, place)
            _note_judge(rows, task, table)
            rows.other_prompts += _prompt(row) not in (None, spec.user_message(task.question))
    rows.longest = sorted(rows.longest, key=lambda task: -len(task.question))[:_LONGEST]
    return rows


def row_findings(rows: Rows, spec: AgentSpec, key: str) -> Iterator[Finding]:
    """What is to be said of them; ``key`` is the setting that names the files."""
    if rows.bad_count:
        more = " ..." if rows.bad_count > len(rows.bad) else ""
        text = f"{key}: {rows.bad_count:,} of {rows.count:,} rows are bad: {'; '.join(rows.bad)}{more}"
        yield Finding(Level.ERROR, "data", f"{text}; an episode of such a row ends the run")
    yield Finding(
        Level.OK if rows.good else Level.ERROR, "data", f"{key}: {rows.good:,} rows that can be read"
    )
    yield from _ids(rows, key)
    for name, count in rows.foreign.items():
        text = f"{key}: {count:,} rows name agent_name={name!r}, another agent loop than {AGENT_LOOP_NAME!r}"
        yield Finding(Level.ERROR, "agent", f"{text}; remove the column agent_name, or say {AGENT_LOOP_NAME}")
    for source, told in rows.unjudged.items():
        yield Finding(Level.ERROR, "rewards", f"{key}: {told} (rows of data_source {source!r})")
    if rows.other_prompts:
        text = f"{key}: {rows.other_prompts:,} of {rows.good:,} rows hold another prompt than agent {spec.name!r} writes"
        advice = "the agent's own is used; `afm data prepare rl` writes rows that agree"
        yield Finding(Level.WARNING, "prompts", f"{text}; {advice}")


def prompt_finding(rows: Rows, spec: AgentSpec, model: Path, limit: int) -> Finding | None:
    """Tokens of the longest prompts against ``data.max_prompt_length``; ``None`` without a tokenizer here.

    Raises:
        ConfigError: The model's folder holds no usable tokenizer.
    """
    if not rows.longest or not (model / "tokenizer.json").is_file():
        return None
    from afm.models.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.load(model)
    lengths = {
        task.id: len(tokenizer.encode_prompt(spec.prompt_messages(task.question))) for task in rows.longest
    }
    name, longest = max(lengths.items(), key=lambda item: item[1])
    text = f"the longest prompt has {longest:,} tokens (row {name!r}), data.max_prompt_length is {limit:,}"
    over = sum(length > limit for length in lengths.values())
    if not over:
        return Finding(Level.OK, "prompts", text)
    more = "at least " if over == len(lengths) == _LONGEST else ""
    advice = (
        f"{more}{over} rows are too long and would end the run (prompts are never cut): raise it or drop them"
    )
    return Finding(Level.ERROR, "prompts", f"{text}; {advice}")


def _rows_of(file: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        raise ConfigError(f"{file}: no such file; `afm data prepare rl` writes one")
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{file}: no parquet file ({error}); `afm data prepare rl` writes one") from None


def _note(rows: Rows, row: Mapping[str, Any], task: Task, place: str) -> None:
    info = row.get("extra_info") or {}
    if info.get("index") in (None, ""):
        rows.unnamed += 1
    elif task.id in rows.seen:
        rows.repeated_count += 1
        if len(rows.repeated) < _LISTED:
            rows.repeated.append(f"{place} has {task.id!r} of {rows.seen[task.id]}")
    else:
        rows.seen[task.id] = place
    loop = row.get("agent_name")
    if loop not in (None, AGENT_LOOP_NAME):
        rows.foreign[str(loop)] += 1
    rows.longest.append(task)
    if len(rows.longest) >= 8 * _LONGEST:
        rows.longest = sorted(rows.longest, key=lambda one: -len(one.question))[:_LONGEST]


def _note_judge(rows: Rows, task: Task, table: Mapping[str, str]) -> None:
    own = task.extra_info.get("reward")
    try:
        if own:
            name = checked_name(str(own), f"extra_info.reward of a {task.data_source!r} row")
        else:
            name = scorer_name(task.data_source, table)
    except AfmError as error:
        rows.unjudged.setdefault(task.data_source, str(error))
        return
    rows.scorers[name] += 1
    if name == "judge" and len(rows.judged) < _JUDGED:
        rows.judged.append(task)


def _ids(rows: Rows, key: str) -> Iterator[Finding]:
    alike = "rows that share an id cannot be told apart in kept episodes, solve rates and seeds"
    if rows.unnamed > 1 or (rows.unnamed and rows.seen):
        text = f"{key}: {rows.unnamed:,} of {rows.good:,} rows have no {_INDEX}, so verl gives each of them 0"
        yield Finding(Level.ERROR, "ids", f"{text}; {alike}: number them, or use `afm data prepare rl`")
    if rows.repeated_count:
        more = " ..." if rows.repeated_count > len(rows.repeated) else ""
        text = f"{key}: {rows.repeated_count:,} rows repeat an {_INDEX}: {'; '.join(rows.repeated)}{more}"
        yield Finding(Level.ERROR, "ids", f"{text}; {alike}: make them unique")
    elif rows.good and not rows.unnamed:
        yield Finding(Level.OK, "ids", f"{key}: every {_INDEX} is unique")


def _prompt(row: Mapping[str, Any]) -> str | None:
    """The user turn that a row holds."""
    prompt = row.get("prompt")
    if not isinstance(prompt, list | tuple) or not prompt or not isinstance(prompt[-1], Mapping):
        return None
    content = prompt[-1].get("content")
    return content if isinstance(content, str) else None
