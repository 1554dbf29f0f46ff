"""Checks of an RL parquet's rows: whether each is readable and has an id, a scorer and an agent that can solve it.

The module also compares the prompts of these rows with those of the model's training.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from heapq import nlargest
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

from afm.agents import PromptMode
from afm.agents.prompt_record import PromptRecord, RunPrompts, run_prompts
from afm.agents.prompt_source import Messages, row_messages
from afm.datasets import Task
from afm.datasets.schema import UNCLEAR_QUESTION, question_is_unclear, task_of_row
from afm.errors import AfmError, ConfigError, DataError, no_such_file
from afm.findings import Finding, Level, made_by
from afm.rewards.registry import BY_SOURCE, checked_name, scorer_name
from afm.rollout.routes import HOPELESS_ADVICE, Route, Routes, mismatch
from afm.terminal import plural
from verl_ext.compose import AGENT_LOOP_NAME
from verl_ext.settings import RlSettings

_LISTED = 3
LONGEST = 256
"""Number of prompts, the longest by characters, whose tokens are counted."""
_JUDGED = 64
_BATCH_ROWS = 256
_INDEX = "extra_info.index"
_WITHOUT_SOURCE = (
    "the row has no data_source, which chooses the reward; write the file again with a name that `afm list rewards` "
    "prints: afm data prepare rl FILE --data-source NAME --out NEW.parquet"
)

BySource = Mapping[str, Mapping[str, str]]
"""Scorer per data source for each agent, by its key in ``agents:``."""


@dataclass(slots=True)
class Examples:
    """A count, with the first few examples."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Count one more example."""
        self.count += 1
        if self.count <= _LISTED:
            self.first.append(text)

    def __str__(self) -> str:
        return "; ".join(self.first) + (" ..." if self.count > len(self.first) else "")


@dataclass(slots=True)
class Rows:
    """Statistics of the rows in some files.

    Attributes:
        count: Number of rows, including bad ones.
        good: Number of rows that can be trained on.
        scorers: Number of rows per scorer.
        longest: Name and chat of the longest prompts.
        judged: Some of the rows that a model judges.
        kinds: Number of rows per data source and ability.
        hopeless: Number of rows per data source and reason why their agent cannot solve them.
        foreign: Number of rows per agent loop that they name, if it is not ours.
        unclear: Rows whose question cannot be separated from the instruction in their prompt.
        by_agent: The rows of each agent, by its key in ``agents:``. Only counts, scorers and judged rows are set.
    """

    count: int = 0
    good: int = 0
    scorers: Counter[str] = field(default_factory=Counter)
    longest: list[tuple[str, list[dict[str, str]]]] = field(default_factory=list)
    judged: list[Task] = field(default_factory=list)
    bad: Examples = field(default_factory=Examples)
    unnamed: int = 0
    repeated: Examples = field(default_factory=Examples)
    foreign: Counter[str] = field(default_factory=Counter)
    unjudged: dict[str, str] = field(default_factory=dict)
    other_prompts: int = 0
    unclear: Examples = field(default_factory=Examples)
    seen: dict[str, str] = field(default_factory=dict)
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    hopeless: Counter[tuple[str, str]] = field(default_factory=Counter)
    by_agent: dict[str, Rows] = field(default_factory=dict)


def read_rows(files: Sequence[str], routes: Routes, by_source: BySource) -> Rows:
    """Read every row of the files as the agent loop does, and return their statistics.

    Args:
        by_source: Scorer per data source for each agent, by its key in ``agents:``.

    Raises:
        ConfigError: A file is missing or is not a parquet file.
    """
    rows = Rows(by_agent={route.name: Rows() for route in routes})
    tables = _tables(by_source)
    for file in files:
        for number, row in enumerate(rows_of(Path(file)), 1):
            rows.count += 1
            place = f"{Path(file).name}:{number}"
            try:
                task = task_of_row(row, default_id=place)
                route = routes.find(task.data_source, task.ability)
                chat = route.prompt.messages(route.spec, task.question, task.prompt) if route else []
            except DataError as error:
                rows.bad.add(f"{place}: {error.message}")
                continue
            rows.good += 1
            _note(rows, row, task, place)
            if route is not None:
                rows.by_agent[route.name].good += 1
                _note_judge(rows, task, route, tables.get(route.name, BY_SOURCE))
                _note_prompt(rows, task, route, chat)
                if route.prompt.mode is not PromptMode.ROW and question_is_unclear(row):
                    rows.unclear.add(place)
    rows.longest = _longest(rows)
    return rows


def _tables(by_source: BySource) -> BySource:
    """Return the scorer of each data source, for each agent."""
    return {
        agent: BY_SOURCE | {source.lower(): name for source, name in own.items()}
        for agent, own in by_source.items()
    }


def _scorer(source: str, own: str, table: Mapping[str, str]) -> str:
    """Return the scorer of a row: the one that it names, else that of its data source."""
    if own:
        return checked_name(own, f"extra_info.reward of a {source!r} row")
    try:
        return scorer_name(source, table)
    except ConfigError:
        if source:
            raise
    raise ConfigError(_WITHOUT_SOURCE)


def check_file(file: str) -> None:
    """Raise ConfigError if none of the first rows can be read, which means that the file has other columns."""
    fault = ""
    for row in islice(rows_of(Path(file)), 8):
        try:
            task_of_row(row, default_id=file)
            return
        except DataError as error:
            why, _, advice = error.message.replace("tasks FILE", f"tasks {quote(file)}").partition("; `afm ")
            advice = f"`afm {advice}" if advice else "write the file with `afm data prepare rl`"
            got = "" if "the columns" in why else f"; got the columns {', '.join(row)}"
            fault = fault or f"its first rows cannot be read: {why}{got}; {advice}"
    if fault:
        raise ConfigError(f"{file}: {fault}")


def check_kinds(settings: RlSettings, by_source: BySource) -> dict[str, set[str]]:
    """Check that every row has an agent and a scorer, print patterns that match no row, and return the scorers by agent.

    Raises:
        ConfigError: A file is not a parquet file, or nothing scores a row. The message names the first one.
        DataError: No agent takes some of the rows.
    """
    kinds: Counter[tuple[str, str]] = Counter()
    own: dict[tuple[str, str, str], str] = {}
    for file in dict.fromkeys((*settings.train_files, *settings.val_files)):
        rows = rows_of(Path(file), ("data_source", "ability", "extra_info.reward"))
        for number, row in enumerate(rows, 1):
            kind = (str(row.get("data_source") or ""), str(row.get("ability") or ""))
            kinds[kind] += 1
            own.setdefault(
                (*kind, str((row.get("extra_info") or {}).get("reward") or "")), f"{file}:{number}"
            )
    routes, tables = settings.routes(), _tables(by_source)
    for warning in routes.check(kinds, "train_files and val_files") if settings.agents else ():
        print(f"warning: {warning}", file=sys.stderr)
    scorers: dict[str, set[str]] = {route.name: set() for route in routes}
    for (source, ability, reward), place in own.items():
        agent = routes.of(source, ability).name
        try:
            scorers[agent].add(_scorer(source, reward, tables[agent]))
        except AfmError as error:
            file = quote(place.rpartition(":")[0])
            raise ConfigError(f"{place}: {str(error).replace(' rl FILE ', f' rl {file} ')}") from None
    return scorers


def row_findings(rows: Rows, routes: Routes, key: str) -> Iterator[Finding]:
    """Report findings about the rows. ``key`` is the setting that names the files."""
    if rows.bad.count:
        text = f"{key}: {rows.bad.count:,} of {rows.count:,} rows are bad: {rows.bad}"
        yield Finding(Level.ERROR, "data", f"{text}; an episode of a bad row ends the run")
    yield Finding(
        Level.OK if rows.good else Level.ERROR, "data", f"{key}: {plural(rows.good, 'readable row')}"
    )
    yield from _ids(rows, key)
    for name, count in rows.foreign.items():
        text = f"{key}: {plural(count, 'row')} with agent_name={name!r}, expected {AGENT_LOOP_NAME!r}"
        yield Finding(
            Level.ERROR, "agent", f"{text}; remove the column agent_name, or set it to {AGENT_LOOP_NAME}"
        )
    for source, reason in rows.unjudged.items():
        yield Finding(Level.ERROR, "rewards", f"{key}: {reason} (rows of data_source {source!r})")
    yield from _agents(rows, routes, key)
    if rows.unclear.count:
        text = f"{key}: {plural(rows.unclear.count, 'row')} may get only a part of their question: {rows.unclear}"
        why = "their prompt has several lines that begin with Question: or Task:, and only the text after the last one is asked"
        yield Finding(Level.ERROR, "prompts", f"{text}; {why}: set prompt=row, or add extra_info.question")
    if rows.other_prompts:
        whose = "their agent" if routes.by_row else f"agent {routes.first.declared.name!r}"
        text = f"{key}: {rows.other_prompts:,} of {rows.good:,} rows have a different prompt than {whose}"
        advice = "the agent's prompt is used; set prompt=row to use the rows', or write them with `afm data prepare rl`"
        yield Finding(Level.WARNING, "prompts", f"{text}; {advice}")


def _agents(rows: Rows, routes: Routes, key: str) -> Iterator[Finding]:
    """Report which agents take the rows, rows without an agent, and rows that their agent can never solve."""
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
        text = f"{key}: {plural(count, 'row')} of data_source {source!r} can never be solved: {why}"
        yield Finding(Level.ERROR, "agents", f"{text}; {HOPELESS_ADVICE}")


def rows_of(file: Path, columns: Sequence[str] | None = None) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a parquet file, with one batch in memory at a time.

    Args:
        columns: Read only these columns, if the file has them.

    Raises:
        ConfigError: The file is missing or is not a parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        advice = made_by(file) or "; create one with `afm data prepare rl`"
        raise ConfigError(f"{file}: {no_such_file(file)}{advice}")
    try:
        with pq.ParquetFile(file) as table:
            there = table.schema_arrow.names
            wanted = [name for name in columns if name.partition(".")[0] in there] if columns else None
            if wanted == []:
                yield from ({} for _ in range(table.metadata.num_rows))
                return
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=wanted):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{file}: not a parquet file ({error}); create one with `afm data prepare rl`"
        ) from None


def _note(rows: Rows, row: Mapping[str, Any], task: Task, place: str) -> None:
    rows.kinds[task.data_source, task.ability] += 1
    info = row.get("extra_info") or {}
    if info.get("index") in (None, ""):
        rows.unnamed += 1
    elif task.id in rows.seen:
        rows.repeated.add(f"{place} has {task.id!r} of {rows.seen[task.id]}")
    else:
        rows.seen[task.id] = place
    loop = row.get("agent_name")
    if loop not in (None, AGENT_LOOP_NAME):
        rows.foreign[str(loop)] += 1


def _note_prompt(rows: Rows, task: Task, route: Route, chat: list[dict[str, str]]) -> None:
    own = route.prompt.mode is PromptMode.OWN
    rows.other_prompts += own and task.prompt is not None and task.prompt[-1] != chat[-1]
    rows.longest.append((task.id, chat))
    if len(rows.longest) >= 8 * LONGEST:
        rows.longest = _longest(rows)


def _longest(rows: Rows) -> list[tuple[str, list[dict[str, str]]]]:
    """Return the longest prompts by characters."""
    return nlargest(LONGEST, rows.longest, key=lambda prompt: sum(len(turn["content"]) for turn in prompt[1]))


def _note_judge(rows: Rows, task: Task, route: Route, table: Mapping[str, str]) -> None:
    try:
        name = _scorer(task.data_source, str(task.extra_info.get("reward") or ""), table)
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
    alike = "rows that share an id cannot be distinguished in kept episodes, solve rates and seeds"
    if rows.unnamed > 1 or (rows.unnamed and rows.seen):
        text = f"{key}: {rows.unnamed:,} of {rows.good:,} rows have no {_INDEX}, so verl gives each of them 0"
        yield Finding(Level.ERROR, "ids", f"{text}; {alike}: number them, or use `afm data prepare rl`")
    if rows.repeated.count:
        text = f"{key}: {plural(rows.repeated.count, 'row')} with the {_INDEX} of an earlier row: {rows.repeated}"
        yield Finding(Level.ERROR, "ids", f"{text}; {alike}: make them unique")
    elif rows.good and not rows.unnamed:
        yield Finding(Level.OK, "ids", f"{key}: every {_INDEX} is unique")


@dataclass(frozen=True, slots=True)
class RlPrompts:
    """The prompts of a run's training rows, by key in ``agents:`` (empty for a single agent)."""

    by_agent: Mapping[str, RunPrompts]

    @property
    def record(self) -> PromptRecord:
        """The prompts that the model is trained with, in this run and before it."""
        every = list(self.by_agent.values())
        asked = reduce(PromptRecord.plus, (prompts.asked for prompts in every))
        return asked.after(every[0].trained)

    def __str__(self) -> str:
        return "; ".join(
            f"{name}: {prompts}" if name else str(prompts) for name, prompts in self.by_agent.items()
        )


def rl_prompts(settings: RlSettings) -> RlPrompts:
    """Return the prompts of the training rows, and check those of the validation rows too.

    Raises:
        ConfigError: The model was trained with another prompt and ``prompt_check`` is on, or a file cannot be read.
        DataError: A row has no prompt. The message names file and row.
    """
    routes = settings.routes()

    def asked(route: Route, files: Sequence[str]) -> RunPrompts:
        rows = _prompts_of(files, routes, route)
        return run_prompts(route.prompt, route.spec, rows, settings.model, check=settings.prompt_check)

    for route in routes:
        asked(route, settings.val_files)
    return RlPrompts({route.name: asked(route, settings.train_files) for route in routes})


def _prompts_of(
    files: Sequence[str], routes: Routes, route: Route
) -> Iterator[tuple[str, str, Messages | None]]:
    """Yield place, name and own prompt of the rows of one agent.

    Raises:
        DataError: ``prompt`` is ``own`` or a file, and a row's question cannot be separated from its instruction.
    """
    wanted = ("data_source", "ability", "prompt", "question", "extra_info")
    from_rows = route.prompt.mode is PromptMode.ROW
    for file in files:
        for number, row in enumerate(rows_of(Path(file), wanted), 1):
            if routes.find(row.get("data_source") or "", row.get("ability") or "") is route:
                if not from_rows and question_is_unclear(row):
                    raise DataError(UNCLEAR_QUESTION, path=file, line=number)
                yield f"{file}:{number}", "?", row_messages(row.get("prompt")) if from_rows else None
