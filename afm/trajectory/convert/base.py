"""What a format is: how its rows are recognised, read and written.

A format may have no place for some fields of a record. They stand in one key, ``afm``, of the row, so that the way there and
back loses nothing. Where the exact text would not come back (odd white space, parts of a trajectory that is none), the segments
are there too, with a digest of what the format shows: once somebody has changed that, the change counts.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ValidationError

from afm.agents import AgentSpec, load_agent
from afm.errors import ConfigError, DataError
from afm.trajectory.convert.dialogue import (
    Dialogue,
    as_read,
    calls_of,
    dialogue_of,
    question_in,
    renamed,
    segments_of,
)
from afm.trajectory.io import explain
from afm.trajectory.record import CallRecord, Cost, Record, TextSegment
from afm.trajectory.types import Segment
from afm.trajectory.validate import validate

KEY = "afm"
SHOWN = ("question", "segments", "calls")
"""Fields that a row shows in its own way."""
_DIGEST = "shown"


def aside(record: Record, also: Collection[str] = (), shown: Any = None) -> dict[str, Any]:
    """The content of the key.

    Args:
        also: Fields of :data:`SHOWN` that do not come back as they are from what the row shows.
        shown: That.
    """
    rest = record.model_dump(mode="json", exclude=set(SHOWN), exclude_defaults=True)
    if not also:
        return rest
    return rest | record.model_dump(mode="json", include=set(also)) | {_DIGEST: _digest(shown)}


def restored(
    kept: Mapping[str, Any],
    question: str,
    segments: tuple[TextSegment, ...] | None,
    shown: Any,
    /,
    **fields: Any,
) -> Record:
    """The record of a row.

    Args:
        kept: The content of the key.
        segments: What the row shows; ``None`` when it shows none that its agent could have written.
        fields: Further ones that the row shows.

    Raises:
        DataError: The key holds something else.
    """
    rest = dict(kept)
    digest = rest.pop(_DIGEST, None)
    if digest is not None and digest != _digest(shown):
        rest = {key: value for key, value in rest.items() if key not in SHOWN}
    if segments is None and "segments" not in rest:
        raise DataError(f"{KEY}: the row was changed, and what it shows now is no trajectory of its agent")
    try:
        return Record.model_validate({"question": question, "segments": segments} | fields | rest)
    except ValidationError as error:
        raise DataError(f"{KEY}: {explain(error)}") from None


def kept_aside(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of the key in a row, empty without one.

    Raises:
        DataError: It is no object.
    """
    kept = row.get(KEY, {})
    if not isinstance(kept, Mapping):
        raise DataError(f"{KEY}: got {type(kept).__name__}, expected an object")
    return kept


def shown_by(dialogue: Dialogue) -> Any:
    """What a conversation shows, for the digest."""
    return [
        dialogue.question,
        [
            [
                turn.text,
                [[use.tool, use.arguments, use.result] for use in turn.uses],
                *([turn.thought] if turn.thought else []),
                *([{"result": turn.result}] if turn.result is not None else []),
            ]
            for turn in dialogue.turns
        ],
    ]


def _digest(shown: Any) -> str:
    text = json.dumps(shown, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


Item = tuple[int, Any]
"""A decoded row and the line on which it begins."""


@dataclass(frozen=True)
class Read:
    """One row as a record.

    Attributes:
        lost: What the row held and the record does not, in a few words each.
    """

    record: Record
    lost: tuple[str, ...] = ()


@dataclass
class Context:
    """What reading and writing need beside the rows.

    Attributes:
        agent: How rows are read that name no agent, and whose declaration writes all rows.
        missing_thought: Stands where an agent needs a thought and a row has none.
        tools: Tools of the agent by other names for them; an empty one leaves calls and results out.
        bare: Write nothing that the format does not know.
        options: Of single formats, such as ``atif_version``.
    """

    agent: AgentSpec | None = None
    missing_thought: str = ""
    tools: Mapping[str, str] = field(default_factory=dict)
    bare: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    _loaded: dict[str, AgentSpec] = field(default_factory=dict)

    def spec(self, name: object = None) -> AgentSpec:
        """The agent of a row.

        Raises:
            DataError: The row names none that can be had, and none is given.
        """
        if self.agent is not None:
            return self.agent
        if not isinstance(name, str) or not name:
            raise DataError("names no agent; give --agent NAME")
        if name not in self._loaded:
            try:
                self._loaded[name] = load_agent(name)
            except ConfigError as error:
                raise DataError(str(error)) from None
        return self._loaded[name]


class Format(ABC):
    """One format.

    Attributes:
        name: In ``--from`` and ``--to``.
        keeps: Whether a row may hold what the format has no place for.
        loses: What is not in a row written with ``bare``, in a few words.
        writable: Whether it is written at all.
    """

    name: ClassVar[str]
    keeps: ClassVar[bool] = True
    loses: ClassVar[str] = ""
    writable: ClassVar[bool] = True

    @abstractmethod
    def known(self, row: Any) -> bool:
        """Whether a row looks like one of this format."""

    @abstractmethod
    def read(self, row: Any, context: Context) -> Read:
        """The record in a row.

        Raises:
            DataError: There is none; without location.
        """

    def write(self, record: Record, context: Context) -> Any:
        """The row of a record.

        Raises:
            DataError: The format cannot hold it; without location.
        """
        raise DataError(f"{self.name} is only read")

    def gathered(self, items: Iterable[Item]) -> Iterator[Item]:
        """Rows put together where one trajectory stands in several; errors among them pass."""
        yield from items


class DialogueFormat(Format):
    """A format of conversations: it says how one is shown; the rest is the same for all of them."""

    @abstractmethod
    def parse(self, row: Any) -> Dialogue:
        """The conversation that a row shows.

        Raises:
            DataError: It shows none.
        """

    @abstractmethod
    def show(self, dialogue: Dialogue, record: Record, context: Context, kept: Mapping[str, Any]) -> Any:
        """A row that shows a conversation, with ``kept`` where the format lets it stand (empty for ``bare``)."""

    def kept(self, row: Any) -> Mapping[str, Any]:
        """What :meth:`show` was given to keep."""
        return kept_aside(row) if isinstance(row, Mapping) else {}

    def read(self, row: Any, context: Context) -> Read:
        """See :class:`Format`."""
        kept = self.kept(row)
        parsed, shown = self._parsed(row, kept)
        spec = context.spec(kept.get("agent"))
        dialogue = renamed(parsed, context.tools)
        facts: dict[str, Any] = {"agent": spec.name, "agent_digest": spec.digest, **dialogue.facts}
        facts.setdefault("id", "")
        segments = calls = None
        try:
            dialogue = as_read(dialogue, spec)
            segments = segments_of(dialogue, spec, missing_thought=context.missing_thought)
            calls = calls_of(dialogue, spec)
        except DataError:
            if "segments" not in kept:
                raise
            segments = None
        if not kept:
            facts |= judged(segments or (), spec) | {"cost": counted(facts.get("cost", Cost()), calls or ())}
        question = question_in(dialogue.question, spec)
        return Read(restored(kept, question, segments, shown, calls=calls or (), **facts), dialogue.lost)

    def write(self, record: Record, context: Context) -> Any:
        """See :class:`Format`."""
        spec = context.spec(record.agent)
        dialogue = dialogue_of(record, spec)
        if context.bare or not self.keeps:
            return self.show(dialogue, record, context, {})
        row = self.show(dialogue, record, context, aside(record))
        missing = self._missing(row, record, spec)
        if not missing:
            return row
        return self.show(
            dialogue, record, context, aside(record, missing, self._parsed(row, dict.fromkeys(SHOWN))[1])
        )

    def _parsed(self, row: Any, kept: Mapping[str, Any]) -> tuple[Dialogue, Any]:
        """What a row shows, and what the digest of it is made of: nothing where only ``kept`` says what it holds."""
        try:
            parsed = self.parse(row)
        except DataError:
            if "segments" not in kept:
                raise
            return Dialogue("", ()), None
        return parsed, shown_by(parsed)

    def _missing(self, row: Any, record: Record, spec: AgentSpec) -> tuple[str, ...]:
        """What does not come back as it is from what a row shows."""
        try:
            back = self.read(row, Context(agent=spec)).record
        except DataError:
            return SHOWN
        return tuple(name for name in SHOWN if getattr(back, name) != getattr(record, name))


def counted(cost: Cost, calls: Collection[CallRecord]) -> Cost:
    """A cost with its tool calls, and those of them that are known to have failed."""
    return cost.model_copy(
        update={"tool_calls": len(calls), "tool_failures": sum(not call.ok for call in calls)}
    )


def judged(segments: Iterable[Any], spec: AgentSpec) -> dict[str, Any]:
    """Whether the agent's rules accept a trajectory that others wrote."""
    faults = validate([Segment(segment.author, segment.text) for segment in segments], spec)
    return {"kept": False, "reason": f"format: {faults[0]}"} if faults else {}
