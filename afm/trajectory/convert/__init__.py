"""Conversion of trajectories from and to other formats (docs/formats.md)."""

from __future__ import annotations

import json
import shlex
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec, agent_of_model
from afm.errors import DataError, UsageError, json_word, suggestion
from afm.terminal import plural, visible
from afm.trajectory.chat import is_message
from afm.trajectory.convert.atif import ATIF
from afm.trajectory.convert.base import ALPACA, ALPACA_KEYS, COA, Context, Format, Item, Read
from afm.trajectory.convert.messages import AGENT_FLAN, MESSAGES, OPENAI, REACT, SHAREGPT
from afm.trajectory.convert.openai_agents import OPENAI_AGENTS
from afm.trajectory.convert.smolagents import SMOLAGENTS
from afm.trajectory.io import QUESTIONS, json_rows, line_item, questions_advice, raw_lines
from afm.trajectory.record import Record
from afm.trajectory.tags import Segment, author_segments

__all__ = ["FORMATS", "Context", "TrajectoryRow", "convert_file", "detected", "read_converted", "read_rows"]

FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        COA,
        ATIF,
        ALPACA,
        SHAREGPT,
        AGENT_FLAN,
        OPENAI,
        REACT,
        OPENAI_AGENTS,
        SMOLAGENTS,
        MESSAGES,
    )
}
"""The formats in the order in which a row is compared with them."""


_WHOLE_BYTES = 256 << 20
"""The largest file that may be one JSON object over many lines."""


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion: rows written, bad rows with file and line, and the number of rows per loss.

    ``refused`` holds the reasons of trajectories marked ``kept: false``: the agent's rules refuse them, or the run failed.
    """

    rows: int
    bad: tuple[DataError, ...]
    lost: Mapping[str, int]
    refused: tuple[str, ...]

    def warnings(self, context: Context, source: str) -> Iterator[str]:
        """Yield what the user should know about rows that were written, read from the format ``source``."""
        called = ", ".join(sorted(context.called)) or f"no tool that --tool can rename in {source}"
        for name in context.tools.keys() - context.called:
            yield f"--tool {name}: no row calls it; the rows call {visible(called)}"
        for name, rows in context.unknown.items():
            yield (
                f"programs of {plural(rows, 'row')} call {name}(), which no code tool of `afm` defines; the sandbox would "
                "raise a NameError (docs/formats.md shows how to train on such programs)"
            )
        for what, rows in self.lost.items():
            yield f"lost in {plural(rows, 'row')}: {what}"


def convert_file(
    source: Path,
    read_as: Format,
    target: Path,
    write_as: Format,
    context: Context,
    *,
    array: bool = False,
    on_row: Callable[[int], None] = lambda rows: None,
) -> Converted:
    """Convert the rows of ``source`` to another format and replace ``target``. Bad rows are skipped and returned.

    A row without an id gets :attr:`Record.identity`.

    Args:
        array: Write one JSON array instead of JSONL.
        on_row: Called with the number of rows read so far, from 1.

    Raises:
        DataError: The file cannot be opened.
        UsageError: The format cannot be written.
    """
    if not write_as.writable:
        raise UsageError(f"--to {write_as.name}: this format can only be read")
    bad: list[DataError] = []
    lost: Counter[str] = Counter()
    refused: list[str] = []
    rows = 0
    with target.open("w", encoding="utf-8") as file:
        for number, (line, row) in enumerate(read_converted(source, read_as, context), start=1):
            on_row(number)
            if isinstance(row, DataError):
                bad.append(row)
                continue
            try:
                text = _row_text(row.record, write_as, context)
            except DataError as error:
                bad.append(DataError(error.message, path=str(source), line=line))
                continue
            lost.update(row.lost)
            refused += [row.record.reason] if not row.record.kept else []
            file.write((("[\n" if rows == 0 else ",\n") if array else "") + text + ("" if array else "\n"))
            rows += 1
        if array:
            file.write("\n]\n" if rows else "[]\n")
    if rows and write_as.loses and (context.bare or write_as.kept is None):
        lost[write_as.loses] += rows
    return Converted(rows, tuple(bad), dict(lost), tuple(refused))


def _row_text(record: Record, write_as: Format, context: Context) -> str:
    named = record.model_copy(update={"id": record.identity})
    text = json.dumps(write_as.write(named, context), ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"half a character ({error.object[error.start]!r}) cannot be written") from None
    return text


def read_converted(path: Path, read_as: Format, context: Context) -> Iterator[tuple[int, Read | DataError]]:
    """Yield each row of a file with its line, as the record or the error of reading it."""
    for line, row in read_as.gathered(rows_of(path)):
        if isinstance(row, DataError):
            yield line, row
            continue
        try:
            yield line, read_as.read(row, context)
        except DataError as error:
            yield line, DataError(error.message + _better_format(row, read_as), path=str(path), line=line)
        except Exception as error:  # noqa: BLE001 - a foreign row may be malformed in any way
            trouble = f"cannot be read as {read_as.name}: {type(error).__name__}: {error}".splitlines()[0]
            yield line, DataError(trouble, path=str(path), line=line)


def _better_format(row: Any, read_as: Format) -> str:
    """Return a hint if a row is in another format than ``read_as``."""
    if advice := _updates_advice(row):
        return f"; {advice}"
    spans = read_as is OPENAI_AGENTS and isinstance(row, list) and row
    part = row[0] if spans else row
    other = next(
        (entry.name for entry in FORMATS.values() if entry.known(part) or entry.known(row)), read_as.name
    )
    if read_as.known(part) or other == read_as.name:
        return ""
    return f"; this is {other}: give --from {other}, or write rows of each format into a file of their own"


_FORMATS_ADVICE = (
    f"the formats are: {', '.join(FORMATS)}. Write the runs as one of them, for example as chat messages, "
    "a list of {role, content, tool_calls} per line"
)


def detected(path: Path) -> Format:
    """Return the format of a file from its first row. An unknown format is an error."""
    for line, row in rows_of(path):
        if isinstance(row, DataError):
            raise row
        if row == []:  # a run without messages, which is a bad row
            continue
        for candidate in FORMATS.values():
            if candidate.known(row):
                return candidate
        shown = f"the keys {sorted(row)[:8]}" if isinstance(row, dict) else json_word(row)
        raise DataError(
            f"got {shown}, which no format has; "
            + (questions_advice(path, row) or _updates_advice(row) or _inner(row, path) or _FORMATS_ADVICE),
            path=str(path),
            line=line,
        )
    raise DataError("holds no rows", path=str(path))


def _updates_advice(row: Any) -> str:
    """Return what to write instead of the updates of a LangGraph stream, or ``""`` for another row."""
    updates = list(row.values()) if isinstance(row, dict) else []
    messages = [update.get("messages") for update in updates if isinstance(update, dict)]
    if not any(isinstance(listed, list) and any(map(is_message, listed)) for listed in messages):
        return ""
    return (
        "this is an update of a LangGraph stream, and updates lack the question; write the whole run: the messages of "
        'what agent.invoke() returns, or of the last item of stream_mode="values" (docs/tutorials/own_logs.md)'
    )


def _inner(row: Any, path: Path, keys: str = "") -> str:
    """Return how to write out the rows of a known format in a list within ``row``, or ``""`` without such a list."""
    for key, value in row.items() if isinstance(row, dict) else ():
        rows = value if isinstance(value, list) else ()
        if any(entry.known(item) for entry in FORMATS.values() for item in rows[:1]):
            expression, file = shlex.quote(f"{keys}.{json.dumps(key)}[]"), shlex.quote(str(path))
            return f"its rows are in {key!r}; write them out: jq -c {expression} {file} > ROWS.jsonl"
        if keys.count(".") < 4 and (advice := _inner(value, path, f"{keys}.{json.dumps(key)}")):
            return advice
    return ""


def rows_of(path: Path) -> Iterator[Item]:
    """Yield the decoded rows of JSONL or of a JSON array. One object or one conversation is one row.

    Lines that are lists of messages or steps are rows too.
    """
    first = _first_line(path)
    line = _json(first)
    if first[:1] == b"{" and line is None:
        whole = _json(_all(path))
        yield from json_rows(path) if whole is None else [(1, whole)]
    elif isinstance(line, list) and line and _is_part(line[0]):
        for number, text in raw_lines(path):
            if text.strip():
                yield number, line_item(text.decode("utf-8", "surrogateescape"), path, number)
    elif first[:1] == b"[" and line is None and _is_part(next((row for _, row in json_rows(path)), None)):
        yield 1, line_item(_all(path).decode("utf-8", "surrogateescape"), path, 1)
    else:
        yield from json_rows(path)


def _first_line(path: Path) -> bytes:
    for _, line in raw_lines(path):
        if line.strip() not in (b"", b"[]"):
            return line.strip()
    return b""


def _all(path: Path) -> bytes:
    """Return the content of a file that may be one row, or ``b""`` if the file is too large for that."""
    return path.read_bytes().removeprefix(BOM_UTF8) if path.stat().st_size <= _WHOLE_BYTES else b""


def _is_part(item: Any) -> bool:
    """Return whether an element of an array is a message or a step, so that the array is one conversation."""
    keys = ("call_id", "step_number", "model_output", "task", "plan")
    whole = not isinstance(item, dict) or bool({"steps", "messages"} & set(item))
    return not whole and (is_message(item) or any(key in item for key in keys))


def _json(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8", "surrogatepass"))  # bytes of UTF-16 would be read, too
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One response of a file, with its agent.

    ``id`` is the row's id or else its number in the file, from 1. ``line`` is the line on which the row begins.
    """

    id: str
    line: int
    spec: AgentSpec
    segments: tuple[Segment, ...]


def read_rows(
    path: str | Path, agent: str | None = None, *, read_as: str | None = None
) -> Iterator[TrajectoryRow | DataError]:
    """Yield every response of a file, and the error of each bad row with path and line.

    Args:
        path: Record JSONL, alpaca JSONL, a JSON array of alpaca rows, or any format that can be converted.
        agent: Agent of all rows (name or YAML). By default each record names its agent, which is the ``agent.yaml``
            next to the file or the shipped one.
        read_as: Name of the format, by default detected from the first row.

    Raises:
        DataError: The file cannot be opened, or begins with a question.
        ConfigError: ``agent`` cannot be loaded.
        UsageError: A row is in the alpaca format, which names no agent, and ``agent`` is ``None``.
    """
    path = Path(path)
    context = Context(agent=agent_of_model(path.parent, agent) if agent else None, file=path)
    other = _other_format(path, read_as)
    rows = json_rows(path) if other is None else read_converted(path, other, context)
    for number, (line, item) in enumerate(rows, start=1):
        try:
            yield item if isinstance(item, DataError) else _trajectory_row(number, line, item, context)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        except DataError as error:
            yield DataError(error.message, path=str(path), line=line)


def _other_format(path: Path, read_as: str | None) -> Format | None:
    """Return the format of a file that must be converted, or ``None`` for records, alpaca rows and unknown rows.

    A file of questions is an error.
    """
    if read_as is not None and read_as not in FORMATS:
        raise UsageError(f"no format {read_as!r}; {suggestion(read_as, FORMATS)}")
    try:
        row_format = detected(path) if read_as is None else FORMATS[read_as]
    except DataError as error:
        if QUESTIONS in error.message:
            raise
        return None
    return None if row_format in (COA, ALPACA) else row_format


def _trajectory_row(number: int, line: int, item: Any, context: Context) -> TrajectoryRow:
    """Return the response of a record, an alpaca row or a converted row."""
    if not isinstance(item, dict | Read):
        raise DataError(f"got {json_word(item)}, expected an object")
    if isinstance(item, Read) or "segments" in item:
        record = item.record if isinstance(item, Read) else COA.read(item, context).record
        return TrajectoryRow(record.id or str(number), line, context.spec(record.agent), record.segments)
    if not isinstance(item.get("output"), str):
        advice = f"; {questions_advice(context.file, item)}" if context.file else ""
        raise DataError(
            f"got the keys {sorted(item)[:8]}, expected a trajectory record or an alpaca row with texts under "
            f"{', '.join(ALPACA_KEYS)}{advice.removesuffix('; ')}"
        )
    if context.agent is None:
        raise UsageError("alpaca rows name no agent; give --agent NAME")
    segments = author_segments(item["output"], context.agent)
    return TrajectoryRow(str(item.get("id", number)), line, context.agent, segments)
