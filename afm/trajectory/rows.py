"""Trajectories of a file in any shape we read: record JSONL, or alpaca rows as JSON or JSONL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from afm.agents import AgentSpec, agent_of_model
from afm.errors import ConfigError, DataError, UsageError
from afm.trajectory.io import explain, raw_lines
from afm.trajectory.parse import author_segments
from afm.trajectory.record import Record
from afm.trajectory.types import Segment

_SEPARATOR = re.compile(r"[\s,]*")
ALPACA_KEYS = ("instruction", "input", "output")


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One response of a file.

    Attributes:
        id: The row's own, else its line number.
        line: 1-based line of the file on which the row begins.
        spec: The agent it is to be read as.
        segments: The response by author; an alpaca row's authors come from its tags.
    """

    id: str
    line: int
    spec: AgentSpec
    segments: tuple[Segment, ...]


def read_rows(path: str | Path, agent: str | None = None) -> Iterator[TrajectoryRow | DataError]:
    """Yield every response of a file, and for a bad row its error with path and line.

    Args:
        path: Record JSONL, alpaca JSONL, or a JSON array of alpaca rows.
        agent: Read all rows as this agent (name or YAML). By default a record is read as the agent it names (the
            ``agent.yaml`` beside the file, or the shipped one).

    Raises:
        DataError: The file cannot be opened.
        ConfigError: ``agent`` cannot be loaded.
        UsageError: An alpaca row is met, which names no agent, and ``agent`` is not given.
    """
    agents = _Agents(Path(path), agent)
    for line, item in json_rows(path):
        if isinstance(item, DataError):
            yield item
            continue
        try:
            yield _row(line, item, agents)
        except (DataError, ConfigError) as error:
            message = error.message if isinstance(error, DataError) else str(error)
            yield DataError(message, path=str(path), line=line)


class _Agents:
    """Loads each agent once."""

    def __init__(self, path: Path, agent: str | None) -> None:
        self._path = path
        self._loaded: dict[str, AgentSpec] = {}
        self._fixed = agent_of_model(path.parent, agent) if agent else None

    def of(self, name: str | None) -> AgentSpec:
        if self._fixed is not None:
            return self._fixed
        if name is None:
            raise UsageError(f"{self._path}: alpaca rows name no agent; give --agent NAME")
        if name not in self._loaded:
            self._loaded[name] = agent_of_model(self._path.parent, name)
        return self._loaded[name]


def _row(line: int, item: Any, agents: _Agents) -> TrajectoryRow:
    if not isinstance(item, dict):
        raise DataError(f"got {type(item).__name__}, expected an object")
    if "segments" in item:
        record = _record(item)
        segments = tuple(Segment(segment.author, segment.text) for segment in record.segments)
        return TrajectoryRow(record.id, line, agents.of(record.agent), segments)
    if not isinstance(item.get("output"), str):
        raise DataError(
            f"got the keys {sorted(item)[:8]}, expected a trajectory record or an alpaca row with texts under "
            f"{', '.join(ALPACA_KEYS)}"
        )
    spec = agents.of(None)
    return TrajectoryRow(str(item.get("id", line)), line, spec, author_segments(item["output"], spec))


def _record(item: dict[str, Any]) -> Record:
    try:
        return Record.model_validate(item)
    except ValidationError as error:
        raise DataError(explain(error)) from None


def json_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Decoded rows of JSONL, or of one JSON array, with the line they begin on.

    A :class:`DataError` stands in place of a row that is no JSON. In an array it is the last item: what follows
    cannot be told apart.
    """
    path = Path(path)
    for number, line in raw_lines(path):
        if not line.strip():
            continue
        if number == 1 and line.lstrip().startswith(b"["):
            yield from _array_items(path)
            return
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, DataError(f"no JSON: {error}", path=str(path), line=number)


def _array_items(path: Path) -> Iterator[tuple[int, Any]]:
    text = path.read_bytes().decode("utf-8", errors="replace")
    decoder = json.JSONDecoder()
    position = _SEPARATOR.match(text, text.index("[") + 1).end()  # type: ignore[union-attr]
    line = 1 + text.count("\n", 0, position)
    while position < len(text) and text[position] != "]":
        try:
            item, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            yield line, DataError(f"no JSON from here on: {error}", path=str(path), line=line)
            return
        yield line, item
        following = _SEPARATOR.match(text, end).end()  # type: ignore[union-attr]
        line += text.count("\n", position, following)
        position = following
    if position >= len(text):
        yield line, DataError("the JSON array is never closed", path=str(path), line=line)
    elif text[position + 1 :].strip():
        yield line, DataError("the JSON array ends here, but the file goes on", path=str(path), line=line)
