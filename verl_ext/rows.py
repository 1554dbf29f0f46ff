"""The rows of an RL parquet as a run will use them: readable, told apart, judged by something, each with an agent that can solve it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afm.agents import PromptMode
from afm.agents.prompt_source import QUESTION_MARK, row_messages
from afm.datasets import Task
from afm.datasets.schema import task_of_row
from afm.errors import AfmError, ConfigError, DataError
from afm.findings import Finding, Level
from afm.rewards.registry import BY_SOURCE, checked_name, scorer_name
from afm.rollout.routes import HOPELESS_ADVICE, Route, Routes, mismatch
from verl_ext.compose import AGENT_LOOP_NAME
from verl_ext.settings import RlSettings

_LISTED = 3
_LONGEST = 256
"""Prompts, the longest by characters, that are counted in tokens."""
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
        longest: Name and chat of the longest prompts.
        judged: Some of the rows that a model judges.
        kinds: Rows by data source and ability.
        hopeless: Rows by data source, and why their agent cannot solve them.
        unclear: Rows whose question cannot be told from the instruction in their prompt.
        by_agent: The rows of each agent, by its key in ``agents:``; nothing but counts, scorers and judged rows.
    """

    count: int = 0
    good: int = 0
    scorers: Counter[str] = field(default_factory=Counter)
    longest: list[tuple[str, list[dict[str, str]]]] = field(default_factory=list)
    judged: list[Task] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    bad_count: int = 0
    unnamed: int = 0
    repeated: list[str] = field(default_factory=list)
    repeated_count: int = 0
    foreign: Counter[str] = field(default_factory=Counter)
    unjudged: dict[str, str] = field(default_factory=dict)
    other_prompts: int = 0
    unclear: list[str] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    hopeless: Counter[tuple[str, str]] = field(default_factory=Counter)
    by_agent: dict[str, Rows] = field(default_factory=dict)


def read_rows(files: Sequence[str], routes: Routes, by_source: Mapping[str, Mapping[str, str]]) -> Rows:
    """Every row of the files, read as the agent loop reads it.

    Args:
        by_source: Of each agent's rewards, by its key in ``agents:``.

    Raises:
        ConfigError: A file is missing or no parquet.
    """
    rows = Rows(by_agent={route.name: Rows() for route in routes})
    tables = {
        agent: BY_SOURCE | {source.lower(): name for source, name in own.items()}
        for agent, own in by_source.items()
    }
    for file in files:
        for number, row in enumerate(rows_of(Path(file)), 1):
            rows.count += 1
            place = f"{Path(file).name}:{number}"
            try:
                task = task_of_row(row, default_id=place)
                route = routes.find(task.data_source, task.ability)
                chat = route.prompt.messages(route.spec, task.question, task.prompt) if route else []
            except DataError as error:
                rows.bad_count += 1
                rows.bad += [f"{place}: {error.message}"] if len(rows.bad) < _LISTED else []
                continue
            rows.good += 1
            _note(rows, row, task, place)
            if route is not None:
                rows.by_agent[route.name].good += 1
                _note_judge(rows, task, route, tables.get(route.name, BY_SOURCE))
                _note_prompt(rows, task, route, chat)
                if route.prompt.mode is not PromptMode.ROW and question_is_unclear(row):
                    rows.unclear.append(place)
    rows.longest = _longest(rows)
    return rows


def kinds_of(files: Sequence[str]) -> Counter[tuple[str, str]]:
    """Number of rows by data source and ability, read from these columns alone.

    Raises:
        ConfigError: A file is missing or no parquet.
    """
    kinds: Counter[tuple[str, str]] = Counter()
    for file in dict.fromkeys(files):
        for row in rows_of(Path(file), ("data_source", "ability")):
            kinds[row.get("data_source") or "", row.get("ability") or ""] += 1
    return kinds


def check_agents(settings: RlSettings) -> None:
    """Whether every row has its agent; patterns that no row matches are said on the terminal.

    Raises:
        ConfigError: A file is no parquet.
        DataError: Rows that no agent takes.
    """
    if not settings.agents:
        return
    kinds = kinds_of((*settings.train_files, *settings.val_files))
    for warning in settings.routes().check(kinds, "train_files and val_files"):
        print(f"warning: {warning}", file=sys.stderr)


def row_findings(rows: Rows, routes: Routes, key: str) -> Iterator[Finding]:
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
    for source, reason in rows.unjudged.items():
        yield Finding(Level.ERROR, "rewards", f"{key}: {reason} (rows of data_source {source!r})")
    yield from _agents(rows, routes, key)
    if rows.unclear:
        text = f"{key}: {len(rows.unclear):,} rows may be asked a part of their question: {', '.join(rows.unclear[:_LISTED])}"
        why = "their prompt has several lines that begin with Question: or Task:, and what follows the last is asked"
        yield Finding(Level.ERROR, "prompts", f"{text}; {why}: say prompt=row, or give extra_info.question")
    if rows.other_prompts:
        whose = "their agent" if routes.by_row else f"agent {routes.first.declared.name!r}"
        text = f"{key}: {rows.other_prompts:,} of {rows.good:,} rows hold another prompt than {whose} writes"
        advice = "the agent's own is used; prompt=row asks with the rows', `afm data prepare rl` writes rows that agree"
        yield Finding(Level.WARNING, "prompts", f"{text}; {advice}")


def _agents(rows: Rows, routes: Routes, key: str) -> Iterator[Finding]:
    """Which agent the rows go to, those that go to none, and those that theirs can never solve."""
    if routes.by_row:
        try:
            for warning in routes.check(rows.kinds, key):
                yield Finding(Level.WARNING, "agents", warning)
        except DataError as error:
            yield Finding(Level.ERROR, "agents", str(error))
        for route in routes:
            text = f"{key}: {rows.by_agent[route.name].good:,} rows go to {route.name}, agent {route.declared.name!r}"
            yield Finding(Level.OK, "agents", text)
    for (source, why), count in rows.hopeless.most_common():
        text = f"{key}: {count:,} rows of data_source {source!r} can never be solved: {why}"
        yield Finding(Level.ERROR, "agents", f"{text}; {HOPELESS_ADVICE}")


def prompt_finding(rows: Rows, model: Path, limit: int) -> Finding | None:
    """Tokens of the longest prompts against ``data.max_prompt_length``; ``None`` without a tokenizer here.

    Raises:
        ConfigError: The model's folder holds no usable tokenizer.
    """
    if not rows.longest or not (model / "tokenizer.json").is_file():
        return None
    from afm.models.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.load(model)
    lengths = {name: len(tokenizer.encode_prompt(chat)) for name, chat in rows.longest}
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


def rows_of(file: Path, columns: Sequence[str] | None = None) -> Iterator[Mapping[str, Any]]:
    """The rows of a parquet file, a batch in memory at a time.

    Args:
        columns: Read these alone, as far as the file has them.

    Raises:
        ConfigError: It is missing or no parquet.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        raise ConfigError(f"{file}: no such file; `afm data prepare rl` writes one")
    try:
        with pq.ParquetFile(file) as table:
            wanted = [name for name in columns if name in table.schema_arrow.names] if columns else None
            if wanted == []:
                yield from ({} for _ in range(table.metadata.num_rows))
                return
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=wanted):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{file}: no parquet file ({error}); `afm data prepare rl` writes one") from None


def _note(rows: Rows, row: Mapping[str, Any], task: Task, place: str) -> None:
    rows.kinds[task.data_source, task.ability] += 1
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


def _note_prompt(rows: Rows, task: Task, route: Route, chat: list[dict[str, str]]) -> None:
    own = route.prompt.mode is PromptMode.OWN
    rows.other_prompts += own and task.prompt is not None and task.prompt[-1] != chat[-1]
    rows.longest.append((task.id, chat))
    if len(rows.longest) >= 8 * _LONGEST:
        rows.longest = _longest(rows)


def question_is_unclear(row: Mapping[str, Any]) -> bool:
    """Whether a row names its question in its prompt alone, where it could begin at several lines."""
    chat = row_messages(row.get("prompt"))
    if chat is None or row.get("question") or (row.get("extra_info") or {}).get("question"):
        return False
    return len(QUESTION_MARK.findall(chat[-1]["content"])) > 1


def _longest(rows: Rows) -> list[tuple[str, list[dict[str, str]]]]:
    """The longest by characters."""
    return sorted(rows.longest, key=lambda prompt: -sum(len(turn["content"]) for turn in prompt[1]))[
        :_LONGEST
    ]


def _note_judge(rows: Rows, task: Task, route: Route, table: Mapping[str, str]) -> None:
    own = task.extra_info.get("reward")
    try:
        if own:
            name = checked_name(str(own), f"extra_info.reward of a {task.data_source!r} row")
        else:
            name = scorer_name(task.data_source, table)
    except AfmError as error:
        rows.unjudged.setdefault(task.data_source, str(error))
        return
    if (why := mismatch(route.declared, name, task.ground_truth)) is not None:
        rows.hopeless[task.data_source, why] += 1
    for part in (rows, rows.by_agent[route.name]):
        part.scorers[name] += 1
        if name == "judge" and len(part.judged) < _JUDGED:
            part.judged.append(task)


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
