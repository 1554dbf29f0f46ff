"""Model calls of a team of another framework, which a gateway writes to the usual event log.

Each call is one event of kind ``call`` whose ``meta`` is a :class:`ModelCall`. An agent sends its whole conversation
with every call, so a log of complete requests would grow with the square of the calls. Therefore only new messages are
written, with the number of messages that an earlier call already holds. Readers get complete calls.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic import Field, ValidationError

from afm.configuration import Settings
from afm.distill.event_log import Event, EventKind, EventLog, read_located
from afm.distill.filters.base import unreadable_row
from afm.errors import DataError, first_fault

_FREE = ("request", "messages", "tools", "prompt", "choices")
"""Fields of free form, written by clients and endpoints."""
_DEEPEST = 100
"""Maximum depth of nesting, half of pydantic's limit."""
_TOO_DEEP = "(nested too deeply)"
_AGENTS_REMEMBERED = 10_000
_CALLS_REMEMBERED = 4
"""Number of remembered calls per agent. A planning call between two others must not repeat the whole conversation."""
_KEEP_SIZE = 1
"""``FALLOC_FL_KEEP_SIZE``: allocate blocks after the end of a file without changing its size."""
_NOT_THERE = (errno.EOPNOTSUPP, errno.ENOSYS)


class Label(Settings):
    """Task, attempt and agent of a call. The attempt distinguishes runs of the same task."""

    task: str = Field(min_length=1, max_length=300)
    agent: str = Field(default="", max_length=300)
    attempt: int = Field(default=1, ge=1)


class Kept(Settings):
    """The part that a call shares with ``event``, an earlier call of the same attempt: first messages, and tools."""

    event: str
    messages: int = 0
    tools: bool = False


class ModelCall(Settings):
    """A request (``messages`` of a chat, without the ``kept`` ones in the log, or ``prompt``) and its answer."""

    path: str
    """``chat/completions`` or ``completions``."""
    model: str = ""
    request: dict[str, Any] = Field(default_factory=dict)
    """The other parameters of the request body."""
    messages: tuple[Any, ...] = ()
    tools: tuple[Any, ...] = ()
    kept: Kept | None = None
    prompt: Any = None
    choices: tuple[dict[str, Any], ...] = ()
    """Choices of the form ``{message | text, finish_reason}``. A stream is joined, as far as it arrived."""
    answered_by: str = ""
    stream: bool = False
    status: int = 0
    """HTTP status of the answer. 0 without an answer."""
    trouble: str = ""
    """Why the answer is unusable: ``status``, ``connect``, ``timeout``, ``broken`` (not JSON), ``cut`` (incomplete),
    ``gone`` (the client disconnected) or ``too_large``. Empty for a usable answer."""
    error: str = ""
    """The endpoint's error message, shortened."""
    first_s: float = 0.0
    """Seconds to the first byte of the answer."""
    priced: bool = True
    """Whether the model has a price. Without one the cost is unknown."""


class Usage(Settings):
    """Tokens, cost and time of a call."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0


class _KnownCall(NamedTuple):
    event: str
    messages: tuple[bytes, ...]
    tools: bytes


class CallLog(EventLog):
    """The event log of one gateway, open for writing by one process at a time.

    Every attempt begins with a ``task`` event. No attempt ends, because a gateway cannot know the last call.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._numbers: Counter[tuple[str, int]] = Counter()
        """Number of events of each attempt."""
        self._known: OrderedDict[Label, list[_KnownCall]] = OrderedDict()
        self._reserved = 0

    def __exit__(self, *about: object) -> None:
        with suppress(OSError, ValueError):
            self.give_back()
        super().__exit__(*about)

    @contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        """Reserve disk space of ``size`` bytes for this log, in addition to the reservations of other calls.

        If the file system cannot reserve space, only the free space is checked.

        Raises:
            OSError: There is not enough space, or a limit is reached.
        """
        self._allocate(self._reserved + size)
        self._reserved += size
        try:
            yield
        finally:
            self._reserved -= size

    def _allocate(self, size: int) -> None:
        """Allocate blocks for ``size`` bytes after the end of the file. Later writes use them."""
        file = self.fileno()
        end = os.fstat(file).st_size
        allocate = ctypes.CDLL(None, use_errno=True).fallocate
        if allocate(file, _KEEP_SIZE, ctypes.c_int64(end), ctypes.c_int64(size)) == 0:
            return
        number = ctypes.get_errno()
        if number in _NOT_THERE:
            disk = os.fstatvfs(file)
            if disk.f_bavail * disk.f_frsize >= size:
                return
            number = errno.ENOSPC
        raise OSError(number, os.strerror(number), str(self.path))

    def record(self, label: Label, call: ModelCall, usage: Usage) -> Event:
        """Log one call. After this returns, a kill of the process cannot lose it.

        Raises:
            OSError: The call cannot be written. The log is unchanged.
        """
        if not self._numbers[label.task, label.attempt]:
            self._put(label, EventKind.TASK, meta={"gateway": True})
        call = _writable(call)
        known = _KnownCall(self._next_id(label), tuple(map(_digest, call.messages)), _digest(call.tools))
        kept = self._common(label, known)
        shortened = call
        if kept is not None:
            rest = call.messages[kept.messages :]
            shortened = call.model_copy(
                update={"kept": kept, "messages": rest, "tools": () if kept.tools else call.tools}
            )
        event = self._put(
            label,
            EventKind.CALL,
            agent=label.agent,
            content=_text(call.choices),
            ok=not call.trouble,
            meta=shortened.model_dump(mode="json", exclude_defaults=True),
            **usage.model_dump(),
        )
        self._remember(label, known)
        return event

    def _count(self, event: Event) -> None:
        super()._count(event)
        self._numbers[event.task_id, event.attempt] += 1

    def _next_id(self, label: Label) -> str:
        return f"{label.task}#{label.attempt}.{self._numbers[label.task, label.attempt]}"

    def _put(self, label: Label, kind: EventKind, **fields: Any) -> Event:
        event = Event(
            id=self._next_id(label),
            task_id=label.task,
            attempt=label.attempt,
            kind=kind,
            time=round(time.time(), 3),
            **fields,
        )
        try:
            self.write(event)
        except OSError:
            with suppress(OSError):
                self._allocate(self._reserved)  # truncation also freed the blocks of other calls
            raise
        return event

    def _common(self, label: Label, call: _KnownCall) -> Kept | None:
        """Return the part shared with the earlier call that has the longest common beginning."""
        best: Kept | None = None
        for before in self._known.get(label, ()):
            count = sum(takewhile(bool, map(eq, before.messages, call.messages)))
            if best is None or count >= best.messages:
                best = Kept(event=before.event, messages=count, tools=before.tools == call.tools)
        return best if best is not None and (best.messages or best.tools) else None

    def _remember(self, label: Label, call: _KnownCall) -> None:
        self._known[label] = [*self._known.pop(label, ())[-_CALLS_REMEMBERED + 1 :], call]
        if len(self._known) > _AGENTS_REMEMBERED:
            self._known.popitem(last=False)


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a chat message. Text parts are joined, and images are left out."""
    content = message.get("content")
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "".join(text for text in parts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _text(choices: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the first choice."""
    if not choices:
        return ""
    text = choices[0].get("text")
    return text if isinstance(text, str) else message_text(choices[0].get("message") or {})


def _digest(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _writable(call: ModelCall) -> ModelCall:
    """Return the call in a form that readers of the log accept.

    Replaces lone surrogates, which JSON can express but a file cannot hold, and values that are nested too deeply.
    """
    call = call.model_copy(update={name: _shallow(getattr(call, name)) for name in _FREE})
    try:
        call.model_dump_json()
    except ValueError:  # PydanticSerializationError
        text = json.dumps(call.model_dump(mode="python"), ensure_ascii=False)
        return ModelCall.model_validate_json(text.encode("utf-8", "replace"))
    return call


def _shallow(value: Any, left: int = _DEEPEST) -> Any:
    """Return a value with everything below ``left`` levels of lists and objects replaced."""
    if not isinstance(value, Mapping | list | tuple):
        return value
    if not left:
        return _TOO_DEEP
    if isinstance(value, Mapping):
        return {name: _shallow(part, left - 1) for name, part in value.items()}
    return type(value)(_shallow(part, left - 1) for part in value)


class RecordedCall(NamedTuple):
    """One complete call, with its shared messages restored, and its event as logged."""

    event: Event
    call: ModelCall


_EVENT_ID = re.compile(rb'"id":\s*("(?:[^"\\]|\\.)+#\d+\.\d+")')
_GO_ON = "--on-bad-rows drop continues without these lines"

Attempt = tuple[str, int]
"""A task's id and the number of the attempt."""


@dataclass
class BadLines:
    """Unreadable lines of a log, and the attempts that may have lost a call.

    An attempt is damaged if a bad line names it, the numbers of its events have a gap, or one of its calls depends on a
    lost one. Its trajectory would be incomplete.
    """

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Rows of :func:`unreadable_row`."""
    damaged: set[Attempt] = field(default_factory=set)
    last: dict[str, int] = field(default_factory=dict)
    """Number of the last attempt at each task that a bad line names."""

    def spoil(self, attempt: Attempt) -> bool:
        """Return whether an attempt is damaged, or followed by one that has only bad lines."""
        return attempt in self.damaged or self.last.get(attempt[0], attempt[1]) > attempt[1]

    def add(self, number: int, line: bytes, error: str) -> None:
        """Add one unreadable line."""
        self.lines.append(unreadable_row(self.path, number, error, line))
        for match in _EVENT_ID.finditer(line):
            try:
                task, _, rest = json.loads(match[1]).rpartition("#")
                attempt = int(rest.partition(".")[0])
            except ValueError:  # an invalid escape, or a number of thousands of digits
                continue
            self.damaged.add((task, attempt))
            self.last[task] = max(attempt, self.last.get(task, attempt))


def read_calls(
    path: str | Path, *, last_only: bool = False, bad: BadLines | None = None
) -> Iterator[tuple[RecordedCall, ...]]:
    """Stream the attempts of a gateway's log, each with all its calls ordered by their end.

    Attempts are ordered by their first call. Memory holds one attempt, and one number for each event of the log.

    Args:
        last_only: Leave out attempts at a task that were followed by another.
        bad: Collects unreadable lines. Calls of a ``damaged`` attempt may lack messages that they share with a lost call.

    Raises:
        DataError: A line cannot be read and there is no ``bad``, or the log was not written by a gateway.
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
    """Return the byte offsets of the calls of each attempt."""
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
            if isinstance(error, KeyError):
                fault = f"it continues event {error.args[0]!r}, which the log lacks"
            else:
                fault = first_fault(error)
            reason = f"event {event.id!r} is not a complete model call: {fault}"
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
    """Return the 1-based number of the line that begins at ``place``."""
    file.seek(0)
    step = 1 << 20  # a log may be larger than memory
    parts = (file.read(min(step, place - begin)) for begin in range(0, place, step))
    return sum(part.count(b"\n") for part in parts) + 1
