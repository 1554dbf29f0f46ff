"""The last attempt at every task of an event log, in the order of the run's tasks, in bounded memory."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from afm.distill.record import ENDS, Event, EventKind, read_located

_HELD = 1_000
"""Attempts that wait for an earlier task's as they are; of further ones only the places in the file are kept."""


_FINAL, _ERROR = (b'"%s"' % kind.encode() for kind in (EventKind.FINAL, EventKind.ERROR))


@dataclass(slots=True)
class _Attempt:
    """The events of one attempt, or where they stand in the file."""

    events: list[Event] = field(default_factory=list)
    places: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, place: int, event: Event) -> None:
        self.places.append(place)
        self.events.append(event)

    def read(self, file: BinaryIO) -> tuple[Event, ...]:
        if self.events:
            return tuple(self.events)
        found = []
        for place in self.places:
            file.seek(place)
            found.append(Event.model_validate_json(file.readline()))
        return tuple(found)


def final_attempts(path: str | Path) -> Iterator[tuple[Event, ...]]:
    """Stream the last ended attempt at each task, in the order of the run's tasks, whatever failed or was killed before.

    Raises:
        DataError: A complete line of the log is no event.
    """
    last = _last_attempts(path)
    running: dict[str, _Attempt] = {}
    waiting: list[tuple[int, str, _Attempt]] = []
    due = 0
    with Path(path).open("rb") as file:
        for place, event in read_located(path):
            if event.attempt != last.get(event.task_id, 1):
                continue
            if event.kind is EventKind.TASK:
                running[event.task_id] = _Attempt()
            running[event.task_id].add(place, event)
            if event.kind not in ENDS:
                continue
            ended = running.pop(event.task_id)
            position = int(ended.events[0].meta["position"])
            if len(waiting) >= _HELD and position > due:
                ended.events.clear()
            heapq.heappush(waiting, (position, event.task_id, ended))
            while waiting and waiting[0][0] <= due:
                position, _, ready = heapq.heappop(waiting)
                due = max(due, position + 1)
                yield ready.read(file)
        while waiting:
            yield heapq.heappop(waiting)[2].read(file)


def _last_attempts(path: str | Path) -> dict[str, int]:
    """The number of the last ended attempt at each task, but where it is the first: few tasks are tried again."""
    again: dict[str, int] = {}
    for _, event in read_located(path, _may_end):
        if event.kind not in ENDS:
            continue
        if event.attempt == 1:
            again.pop(event.task_id, None)
        else:
            again[event.task_id] = event.attempt
    return again


def _may_end(line: bytes) -> bool:
    """Whether a line can be the end of an attempt: it says so in plain letters, or spells letters by number."""
    return _FINAL in line or _ERROR in line or b"\\u00" in line
