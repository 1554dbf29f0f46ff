"""The log of a gateway, read: the calls of each attempt at a task, whole again."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from afm.distill.gateway import ModelCall
from afm.distill.record import Event, EventKind, read_located
from afm.errors import DataError

_EVENT_ID = re.compile(rb'"id":\s*("(?:[^"\\]|\\.)+#\d+\.\d+")')
_GO_ON = "--on-bad-rows drop goes on without such lines"

Attempt = tuple[str, int]
"""A task's id and the number of the attempt."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call as it was made, its kept messages put back.

    Attributes:
        event: As it stands in the log.
        call: Whole.
    """

    event: Event
    call: ModelCall


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of the log that is no event, or no call.

    Attributes:
        number: 1-based.
    """

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

    Attempts come in the order of their first call. Memory holds one attempt and a number for each event of the log. Blank lines
    are passed over.

    Args:
        last_only: Leave out attempts at a task that were followed by another.
        bad: Takes the lines that cannot be read, all of them before the first attempt comes, but for calls that are not whole.
            Calls of an attempt that is then ``damaged`` may lack the messages that they share with a lost one.

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
                call = _with_kept(call, whole[call.kept.event])
        except (ValidationError, KeyError) as error:
            reason = f"event {event.id!r} is no whole model call: {_why(error)}"
            if bad is None:
                raise DataError(f"{reason}; {_GO_ON}", path=str(path), line=_number(file, place)) from None
            if attempt not in bad.damaged or isinstance(error, ValidationError):
                bad.add(_number(file, place), line, reason)
            bad.damaged.add(attempt)
        whole[event.id] = call
        yield RecordedCall(event, call)


def _with_kept(call: ModelCall, before: ModelCall) -> ModelCall:
    assert call.kept is not None
    update: dict[str, Any] = {
        "messages": before.messages[: call.kept.messages] + call.messages,
        "kept": None,
    }
    return call.model_copy(update=update | ({"tools": before.tools} if call.kept.tools else {}))


def _why(error: ValidationError | KeyError) -> str:
    if isinstance(error, KeyError):
        return f"it continues event {error.args[0]!r}, which the log lacks"
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'meta'}: {first['msg']}"


def _number(file: BinaryIO, place: int) -> int:
    """The 1-based number of the line that begins there."""
    file.seek(0)
    lines, left = 1, place
    while left and (part := file.read(min(left, 1 << 20))):
        lines += part.count(b"\n")
        left -= len(part)
    return lines
