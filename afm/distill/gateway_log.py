"""The log of a gateway, read: the calls of each attempt at a task, whole again, and the trajectories that they become."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from afm.agents import AgentSpec
from afm.datasets import Task
from afm.distill.event_log import Event, EventKind, explain, read_located
from afm.distill.filters.base import without_event
from afm.distill.gateway import Kept, ModelCall, RecordedCall
from afm.distill.reconstruct import merge_calls, task_of
from afm.distill.run import KEPT_FILE, MANIFEST_FILE, Progress, writing_records
from afm.distill.team_map import TeamMap
from afm.errors import DataError
from afm.runs.atomic import replace_text
from afm.runs.folder import write_manifest
from afm.trajectory.record import Record, StopReason

_EVENT_ID = re.compile(rb'"id":\s*("(?:[^"\\]|\\.)+#\d+\.\d+")')
_GO_ON = "--on-bad-rows drop goes on without such lines"

Attempt = tuple[str, int]
"""A task's id and the number of the attempt."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of the log that is no event, or no call, by its 1-based number."""

    number: int
    error: str
    text: str


@dataclass
class BadLines:
    """What of a log cannot be read, and which attempts may have lost a call by it.

    An attempt is damaged when a bad line names it, when the numbers of its events have a gap, or when a call of it builds on
    one that is lost. Merged all the same, it would be a trajectory in which something is missing.
    """

    lines: list[BadLine] = field(default_factory=list)
    damaged: set[Attempt] = field(default_factory=set)
    last: dict[str, int] = field(default_factory=dict)
    """The last attempt at each task that a bad line names."""

    def spoil(self, attempt: Attempt) -> bool:
        """Whether an attempt is damaged, or followed by one of which bad lines alone are left."""
        return attempt in self.damaged or self.last.get(attempt[0], attempt[1]) > attempt[1]

    def add(self, number: int, line: bytes, error: str) -> None:
        """Take note of one line."""
        self.lines.append(BadLine(number, error, line.rstrip(b"\r\n").decode(errors="replace")))
        for match in _EVENT_ID.finditer(line):
            try:
                task, _, rest = json.loads(match[1]).rpartition("#")
                attempt = int(rest.partition(".")[0])
            except ValueError:  # an escape that is none, a number of thousands of digits
                continue
            self.damaged.add((task, attempt))
            self.last[task] = max(attempt, self.last.get(task, attempt))


def read_calls(
    path: str | Path, *, last_only: bool = False, bad: BadLines | None = None
) -> Iterator[tuple[RecordedCall, ...]]:
    """Stream the attempts of a gateway's log, each with all its calls in the order in which they ended.

    Attempts come in the order of their first call. Memory holds one attempt and a number for each event of the log.

    Args:
        last_only: Leave out attempts at a task that were followed by another.
        bad: Takes the lines that cannot be read. Calls of a ``damaged`` attempt may lack messages that they share with a lost one.

    Raises:
        DataError: A line cannot be read and ``bad`` is not given, or the log is no gateway's.
    """
    places = _places(Path(path), bad)
    if not places:
        raise DataError("holds no model calls; expected the log of a gateway", path=str(path))
    last = dict(sorted(places))
    with Path(path).open("rb") as file:
        for attempt, offsets in places.items():
            if not last_only or attempt[1] == last[attempt[0]]:
                yield tuple(_restored(file, offsets, attempt, path, bad))


def _places(path: Path, bad: BadLines | None) -> dict[Attempt, array[int]]:
    """Where the calls of each attempt stand."""
    places: dict[Attempt, array[int]] = {}
    counts: dict[Attempt, int] = {}

    def note(number: int, line: bytes, error: DataError) -> None:
        if bad is None:
            raise DataError(f"{error.message}; {_GO_ON}", path=str(path), line=number)
        bad.add(number, line, error.message)

    for place, event in read_located(path, on_bad=note):
        attempt = (event.task_id, event.attempt)
        if bad is not None and event.id.rpartition(".")[2] != str(counts.get(attempt, 0)):
            bad.damaged.add(attempt)
        counts[attempt] = counts.get(attempt, 0) + 1
        if event.kind is EventKind.CALL:
            places.setdefault(attempt, array("Q")).append(place)
    return places


def _restored(
    file: BinaryIO, places: Sequence[int], attempt: Attempt, path: str | Path, bad: BadLines | None
) -> Iterator[RecordedCall]:
    whole: dict[str, ModelCall] = {}
    for place in places:
        file.seek(place)
        line = file.readline()
        event = Event.model_validate_json(line)
        call = ModelCall(path="")
        try:
            call = ModelCall.model_validate(event.meta)
            if call.kept is not None:
                call = _with_kept(call, call.kept, whole[call.kept.event])
        except (ValidationError, KeyError) as error:
            fault = (
                f"it continues event {error.args[0]!r}, which the log lacks"
                if isinstance(error, KeyError)
                else explain(error)
            )
            reason = f"event {event.id!r} is no whole model call: {fault}"
            if bad is None:
                raise DataError(f"{reason}; {_GO_ON}", path=str(path), line=_number(file, place)) from None
            if attempt not in bad.damaged or isinstance(error, ValidationError):
                bad.add(_number(file, place), line, reason)
            bad.damaged.add(attempt)
        whole[event.id] = call
        yield RecordedCall(event, call)


def _with_kept(call: ModelCall, kept: Kept, before: ModelCall) -> ModelCall:
    messages = before.messages[: kept.messages] + call.messages
    tools = before.tools if kept.tools else call.tools
    return call.model_copy(update={"messages": messages, "tools": tools, "kept": None})


def _number(file: BinaryIO, place: int) -> int:
    """The 1-based number of the line that begins there."""
    file.seek(0)
    lines, left = 1, place
    while left and (part := file.read(min(left, 1 << 20))):
        lines += part.count(b"\n")
        left -= len(part)
    return lines


UNREADABLE_FILE = "unreadable.jsonl"


@dataclass(frozen=True, slots=True)
class Merged:
    """What a log became: trajectories kept in ``path``, attempts dropped by reason, tasks ``missing`` in the log.

    Attributes:
        cost_usd: Of all calls, those of dropped attempts included.
        unreadable: Lines of the log that could not be read, listed in ``unreadable.jsonl`` beside ``path``.
    """

    path: Path
    kept: int
    dropped: Mapping[str, int]
    missing: int
    cost_usd: float
    unreadable: int = 0


def merge_gateway_log(
    log: Path,
    tasks: Iterable[Task],
    spec: AgentSpec,
    team: TeamMap,
    output_dir: Path,
    *,
    name: str = "",
    drop_bad_lines: bool = False,
    progress: Progress | None = None,
) -> Merged:
    """Write ``trajectories.jsonl``, ``dropped.jsonl`` and ``manifest.json`` into ``output_dir``; each appears whole.

    Of several attempts at a task the last one counts.

    Args:
        drop_bad_lines: Skip lines that cannot be read. ``unreadable.jsonl`` lists them with number and error, and attempts that may
            have lost a call are dropped.

    Raises:
        DataError: A line of the log cannot be read and ``drop_bad_lines`` is not set, or no gateway wrote the log.
    """
    bad = BadLines() if drop_bad_lines else None
    known = {task.id: task for task in tasks}
    counts: Counter[str] = Counter()
    seen: set[str] = set()
    cost = 0.0
    with writing_records(output_dir) as write:
        for number, record in enumerate(_records(log, known, spec, team, name, bad), 1):
            cost += record.provenance.get("cost_usd", 0.0)
            seen.add(record.id)
            counts["" if record.kept else _kind(record.reason)] += 1
            write(record)
            if progress is not None:
                progress("merge", number, None)
    merged = Merged(
        path=output_dir / KEPT_FILE,
        kept=counts.pop("", 0),
        dropped=dict(counts),
        missing=len(known.keys() - seen),
        cost_usd=round(cost, 6),
        unreadable=_list_bad_lines(log, bad, output_dir / UNREADABLE_FILE),
    )
    write_manifest(
        output_dir / MANIFEST_FILE,
        counts={
            "kept": merged.kept,
            "dropped": sum(merged.dropped.values()),
            "tasks_without_calls": merged.missing,
            **({"unreadable_lines": merged.unreadable} if merged.unreadable else {}),
        },
        inputs=[log],
        spec=spec,
        team=name,
        map=team.model_dump(mode="json", exclude_defaults=True),
        dropped=merged.dropped,
        cost_usd=merged.cost_usd,
    )
    return merged


def _records(
    log: Path, tasks: Mapping[str, Task], spec: AgentSpec, team: TeamMap, name: str, bad: BadLines | None
) -> Iterator[Record]:
    merged: set[str] = set()
    for calls in read_calls(log, last_only=True, bad=bad):
        task, first = task_of(calls, tasks), calls[0].event
        if task is None:
            yield _refuse(calls, spec, "no task of this name among the tasks")
        elif task.id in merged:
            yield _refuse(calls, spec, "its task has a trajectory already", task)
        elif bad is not None and bad.spoil((first.task_id, first.attempt)):
            yield _refuse(calls, spec, "lines of its last attempt cannot be read", task)
        else:
            merged.add(task.id)
            yield merge_calls(calls, task, spec, team, name=name)


def _list_bad_lines(log: Path, bad: BadLines | None, out: Path) -> int:
    """Write the bad lines into a file, which is there only if there are any; returns how many."""
    if bad is None or not bad.lines:
        out.unlink(missing_ok=True)
        return 0
    rows = (
        {"path": str(log), "line": line.number, "error": line.error, "text": line.text}
        for line in sorted(bad.lines, key=lambda line: line.number)
    )
    replace_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(bad.lines)


def _refuse(calls: Sequence[RecordedCall], spec: AgentSpec, reason: str, task: Task | None = None) -> Record:
    cost = sum(call.event.cost_usd for call in calls)
    return Record(
        id=calls[0].event.task_id,
        agent=spec.name,
        agent_digest=spec.digest,
        question=task.question if task else "",
        segments=(),
        stop=StopReason.ERROR,
        provenance={"attempt": calls[0].event.attempt, "cost_usd": round(cost, 6)},
        kept=False,
        reason=reason,
    )


def _kind(reason: str) -> str:
    """A reason without the place in it."""
    return without_event(reason).partition(" at character ")[0]
