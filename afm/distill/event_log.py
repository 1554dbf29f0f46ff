"""The event log of a team at work: one append-only JSONL file per run, safe against ``kill -9``.

Every line is one :class:`Event`. An attempt at a task begins with a ``task`` event and ends with a ``final`` or
``error`` event. An attempt without an end died with its process. The next run starts the task again as a new
attempt, so no task is lost and none counts twice.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from pydantic import Field, ValidationError

from afm.configuration import Settings
from afm.datasets import Task
from afm.endpoints.budget import Spent
from afm.errors import AfmError, ConfigError, DataError, first_fault, suggestion
from afm.plugins import own_code_error
from afm.runs.journal import Journal
from afm.tools import Tool, ToolResult
from afm.tools.base import call_tool


class EventKind(StrEnum):
    """What happened."""

    TASK = "task"
    """An attempt begins; ``meta`` holds the task and its position in the run."""
    MESSAGE = "message"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    CALL = "call"
    """A request to a model, with its cost. ``ok`` is False if the server failed. Request and reply are in ``meta``
    (:mod:`afm.distill.model_calls`), or in the messages that follow (:mod:`afm.distill.model_team`)."""
    FINAL = "final"
    """The team's answer. It ends the attempt."""
    ERROR = "error"
    """The team gave up, or its infrastructure failed. This ends the attempt. The next run tries again unless ``meta``
    contains :data:`DECLINED`."""


ENDS = frozenset({EventKind.FINAL, EventKind.ERROR})
"""Kinds of events that end an attempt."""
DECLINED = "declined"
"""Key of ``meta``: true in the error of a task that the team cannot read or rejects. A further attempt would not help."""
PART, THOUGHT, INTENT = "part", "thought", "intent"
"""Keys and values of ``meta``. A message with ``part: thought`` is a member's thought before it acted. ``intent`` is the
purpose of a message or tool call."""
CHECKED, ACCEPTED = "checked", "accepted"
"""Keys of ``meta`` in a verifier's message: the suggested answer, and whether it passed."""

TOKENS, ESTIMATED = "tokens", "estimated"
"""Key and value of ``meta``: the server reported no usage, so the tokens of the call are estimated from its text length."""


class Event(Settings):
    """One action of one member of the team."""

    id: str
    """``TASK#ATTEMPT.NUMBER``, unique in the log."""
    task_id: str
    attempt: int
    kind: EventKind
    agent: str = ""
    """The member's name in its team (not a tag). Empty for the environment."""
    content: str = ""
    tool: str = ""
    ok: bool = True
    """False when a tool's infrastructure failed."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0
    """Duration of a model or tool call."""
    time: float = 0.0
    """Seconds since the epoch."""
    meta: dict[str, Any] = Field(default_factory=dict)


class EventLog(Journal):
    """The log of one run, open for writing by one process at a time.

    Use it as a context manager. Opening moves a half-written last line away. It also reads which tasks are ``finished``
    (answered or declined, so no run tries them again) and what all attempts have ``spent``.

    Raises:
        ConfigError: Another process is writing the same log.
        DataError: A complete line of the log cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(Path(path))
        self.finished: set[str] = set()
        self.spent = Spent()
        self._attempts: Counter[str] = Counter()

    def _read_back(self) -> None:
        for event in read_events(self.path):
            self._count(event)

    def _count(self, event: Event) -> None:
        """Count an event of this process or of an earlier one."""
        tokens = event.prompt_tokens + event.completion_tokens
        self.spent.add(Spent(event.kind is EventKind.CALL, tokens, event.cost_usd))
        self._attempts[event.task_id] = max(self._attempts[event.task_id], event.attempt)
        if event.kind is EventKind.FINAL or (event.kind is EventKind.ERROR and event.meta.get(DECLINED)):
            self.finished.add(event.task_id)

    def write(self, event: Event) -> None:
        """Append one line and pass it to the operating system at once. A kill leaves at most the last line torn.

        Raises:
            OSError: The line cannot be written, for example on a full disk. Then the log holds nothing of it.
        """
        self.append(event.model_dump_json(exclude_defaults=True).encode() + b"\n")
        self._count(event)

    def begin(
        self, task: Task, position: int, tools: Mapping[str, Tool], *, hidden: bool = False
    ) -> Recorder:
        """Start a new attempt at ``task``. For a ``hidden`` task the file gets figures but no text."""
        attempt = self._attempts[task.id] + 1
        return Recorder(self, task, position, tools, attempt=attempt, hidden=hidden)


class EventSink(Protocol):
    """A receiver of the events of an attempt."""

    @property
    def spent(self) -> Spent:
        """The cost of all attempts so far."""
        ...

    def write(self, event: Event) -> None:
        """Receive one event."""
        ...


class Recorder:
    """The interface through which a team works on one attempt. It logs every message, call and result."""

    def __init__(
        self,
        log: EventSink,
        task: Task,
        position: int,
        tools: Mapping[str, Tool],
        *,
        attempt: int,
        hidden: bool = False,
    ) -> None:
        self.task = task
        self.ended = False
        self.declined = False
        self.failure = ""
        self.events: list[Event] = []
        self._log = log
        self._tools = tools
        self._attempt = attempt
        self._hidden = hidden
        self._number = 0
        self._add(EventKind.TASK, meta={"position": position, "task": task.model_dump(mode="json")})

    @property
    def spent(self) -> Spent:
        """The cost of the whole log so far."""
        return self._log.spent

    def call(self, agent: str, **usage: Any) -> Event:
        """Log a member's request to its model. ``usage`` takes the fields of :class:`Event`."""
        return self._add(EventKind.CALL, agent=agent, **usage)

    def say(self, agent: str, content: str, **usage: Any) -> Event:
        """Log a member's message. ``usage`` takes the token, cost and time fields of :class:`Event`."""
        return self._add(EventKind.MESSAGE, agent=agent, content=content, **usage)

    async def use(self, agent: str, tool: str, argument: str, **usage: Any) -> ToolResult:
        """Call a tool for a member. Logs the call, and the result word for word."""
        if tool not in self._tools:
            raise ConfigError(f"the team has no tool {tool!r}; {suggestion(tool, self._tools or ('none',))}")
        self._add(EventKind.TOOL_CALL, agent=agent, tool=tool, content=argument, **usage)
        started = time.perf_counter()
        try:
            result = await call_tool(tool, self._tools[tool], argument)
        except AfmError:
            raise
        except Exception as error:
            raise own_code_error(error, f"the tool {tool!r}, called with {argument[:80]!r},") from error
        seconds = round(time.perf_counter() - started, 6)
        self._add(EventKind.TOOL_RESULT, tool=tool, content=result.text, ok=result.ok, seconds=seconds)
        return result

    def observe(self, agent: str, tool: str, argument: str, text: str, *, ok: bool = True) -> Event:
        """Log the call of a member's own tool, and its result."""
        self._add(EventKind.TOOL_CALL, agent=agent, tool=tool, content=argument)
        return self._add(EventKind.TOOL_RESULT, tool=tool, content=text, ok=ok)

    def finish(self, agent: str, answer: str, **usage: Any) -> Event:
        """Log the team's answer and end the attempt."""
        return self._add(EventKind.FINAL, agent=agent, content=answer, **usage)

    def fail(self, reason: str) -> Event:
        """End the attempt without an answer. ``reason`` must not be empty."""
        self.failure = reason
        return self._add(EventKind.ERROR, content=reason)

    def decline(self, reason: str) -> Event:
        """End the attempt because this team can never answer the task. ``reason`` must not be empty.

        Unlike a failure, a declined task does not count against the team or its tools. The run continues however many
        tasks are declined, and later runs do not try them again.
        """
        self.declined = True
        return self._add(EventKind.ERROR, content=reason, meta={DECLINED: True})

    def _add(self, kind: EventKind, **fields: Any) -> Event:
        if self.ended:
            raise ValueError(f"task {self.task.id!r}: {kind.value} event after the attempt ended")
        if not isinstance(content := fields.get("content", ""), str):
            raise TypeError(f"{kind.value} event: expected a text, got {type(content).__name__} {content!r}")
        event = Event(
            id=f"{self.task.id}#{self._attempt}.{self._number}",
            task_id=self.task.id,
            attempt=self._attempt,
            kind=kind,
            time=round(time.time(), 3),
            **fields,
        )
        self._number += 1
        self.ended = kind in ENDS
        self._log.write(_without_text(event) if self._hidden else event)
        self.events.append(event)
        return event


def _without_text(event: Event) -> Event:
    shown = {
        key: value for key, value in event.meta.items() if key in (TOKENS, DECLINED, "model", "position")
    }
    return event.model_copy(update={"content": "", "meta": shown})


def read_events(path: str | Path) -> Iterator[Event]:
    """Stream the events of a log. A torn last line is left out.

    Raises:
        DataError: A complete line is not an event.
    """
    return (event for _, event in read_located(path))


def read_located(
    path: str | Path, on_bad: Callable[[int, bytes, DataError], None] | None = None
) -> Iterator[tuple[int, Event]]:
    """Stream the events of a log, each with the byte offset of its line. Blank lines are skipped.

    Args:
        on_bad: Receives number, text and fault of a line that is not an event. The line is skipped. By default the fault
            is raised.
    """
    place = 0
    event_of = Event.model_validate_json
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            if not line.isspace():
                try:
                    event = event_of(line)
                except ValidationError as error:
                    if on_bad is None:
                        raise _fault(error, path, number) from None
                    on_bad(number, line, _fault(error, path, number))
                else:
                    yield place, event
            place += len(line)


def ended_attempts(path: str | Path) -> Iterator[tuple[Event, Event, array[int]]]:
    """Stream the first and last event of each ended attempt with the offsets of all its events, ordered by end."""
    running: dict[str, tuple[Event, array[int]]] = {}
    for place, event in read_located(path):
        if event.kind is EventKind.TASK:
            running[event.task_id] = event, array("Q")
        first, places = running[event.task_id]
        places.append(place)
        if event.kind in ENDS:
            del running[event.task_id]
            yield first, event, places


def read_at(file: BinaryIO, places: Iterable[int]) -> Iterator[Event]:
    """Read the events whose lines begin at these byte offsets (:func:`read_located`)."""
    for place in places:
        file.seek(place)
        yield Event.model_validate_json(file.readline())


def _fault(error: ValidationError, path: str | Path, line: int) -> DataError:
    return DataError(f"not an event: {first_fault(error)}", path=str(path), line=line)


def final_attempts(path: str | Path) -> Iterator[tuple[Event, ...]]:
    """Stream the last ended attempt at each task in the order of the run's tasks.

    Memory holds only the offsets of the events.

    Raises:
        DataError: A complete line of the log is not an event.
    """
    ended = {
        first.task_id: (int(first.meta["position"]), places) for first, _, places in ended_attempts(path)
    }
    with Path(path).open("rb") as file:
        for _, places in sorted(ended.values(), key=itemgetter(0)):
            yield tuple(read_at(file, places))
