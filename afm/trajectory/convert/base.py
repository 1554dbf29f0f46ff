"""The interface of a format, which recognises, reads and writes rows, and the two formats of tagged text.

A format may have no place for some fields of a record. The row then holds them under the key ``afm``, so that a round
trip loses nothing. Some texts would not survive a round trip unchanged, such as odd white space or an invalid
trajectory. For them the key also holds the segments, with a digest of what the format shows. If the shown text is
edited later, the digest differs and the edit counts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from afm.agents import AgentSpec, agent_of_model, load_agent
from afm.errors import BadArgumentError, ConfigError, DataError, json_word
from afm.trajectory.chat import row_id, text_of
from afm.trajectory.convert.dialogue import (
    Dialogue,
    as_read,
    calls_of,
    dialogue_of,
    question_in,
    renamed,
    segments_of,
)
from afm.trajectory.io import convert_advice, explain
from afm.trajectory.programs import CODE_TOOL, parse_program, unknown_functions
from afm.trajectory.record import CallRecord, Cost, Record
from afm.trajectory.tags import Segment, author_segments, split
from afm.trajectory.validate import validate

KEY = "afm"
_SHOWN = ("question", "segments", "calls")
"""The fields that a row shows in the form of its format."""
_DIGEST = "shown"
_LOSES = "id, gold answer, verdict, cost and provenance"

Item = tuple[int, Any]
"""A decoded row and the line on which it begins."""


@dataclass(frozen=True)
class Read:
    """One row as a record, and short descriptions of what the record does not hold."""

    record: Record
    lost: tuple[str, ...] = ()


@dataclass
class Context:
    """The options of reading and writing.

    Attributes:
        agent: The agent of all rows. Without it, each row must name its agent.
        missing_thought: The thought to write if an agent needs one that a row lacks.
        tools: Maps names of tools in rows to tools of the agent. An empty value drops the calls and their results.
        bare: Write nothing that the format does not define.
        atif_version: The version to write. 1.8 adds recordings, which no record holds, and fewer readers know it.
        file: The file of the rows, for messages. An ``agent.yaml`` next to it declares their agents.
        called: The tools that rows called, by the rows' names. Reading adds to them.
        unknown: The number of rows per function that their programs call and do not define. Reading adds to them.
    """

    agent: AgentSpec | None = None
    missing_thought: str = ""
    tools: Mapping[str, str] = field(default_factory=dict)
    bare: bool = False
    atif_version: str = "1.7"
    file: Path | None = None
    called: set[str] = field(default_factory=set)
    unknown: Counter[str] = field(default_factory=Counter)
    _loaded: dict[str, AgentSpec] = field(default_factory=dict)

    def spec(self, name: object = None) -> AgentSpec:
        """Return the agent of all rows or else the one that a row names. Without both it is an error."""
        if self.agent is not None:
            return self.agent
        if not isinstance(name, str) or not name:
            advice = f", or {convert_advice(self.file)}" if self.file else ""
            raise DataError(f"names no agent; give --agent NAME, or --agent FILE for your own agent{advice}")
        if name not in self._loaded:
            try:
                self._loaded[name] = (
                    load_agent(name) if self.file is None else agent_of_model(self.file.parent, name)
                )
            except ConfigError as error:
                raise DataError(f"{error}: --agent FILE") from None
        return self._loaded[name]


def kept_aside(row: Any) -> Mapping[str, Any]:
    """Return the content of the key in a row, empty without one. A value that is not an object is an error."""
    kept = row.get(KEY, {}) if isinstance(row, Mapping) else {}
    if not isinstance(kept, Mapping):
        raise DataError(f"{KEY}: got {json_word(kept)}, expected an object")
    return kept


def keep_aside(row: Any, kept: Mapping[str, Any]) -> None:
    """Write the content of the key into a row."""
    row[KEY] = dict(kept)


@dataclass(frozen=True, slots=True)
class Format:
    """One format. A :class:`~afm.errors.DataError` of its functions has no location.

    Attributes:
        name: The name in ``--from`` and ``--to``.
        known: Returns whether a row looks like one of this format.
        loses: A short description of what a row written with ``bare`` does not hold.
        kept: Returns the fields of a record for which the format has no place. ``None`` if a row cannot hold them.
        gathered: Joins the rows of a trajectory that is spread over several. Errors among them pass.
    """

    name: str
    known: Callable[[Any], bool]
    loses: str = _LOSES
    kept: Callable[[Any], Mapping[str, Any]] | None = kept_aside
    gathered: Callable[[Iterable[Item]], Iterator[Item]] = iter

    @property
    def writable(self) -> bool:
        """Whether rows can be written."""
        return True

    def read(self, row: Any, context: Context) -> Read:
        """Return the record of a row."""
        raise NotImplementedError

    def write(self, record: Record, context: Context) -> Any:
        """Return the row of a record."""
        raise NotImplementedError


def row_object(row: Any, expected: str) -> dict[str, Any]:
    """Return ``row`` if it is an object. The error otherwise names the ``expected`` keys."""
    if not isinstance(row, dict):
        raise DataError(f"got {json_word(row)}, expected an object with {expected}")
    return row


def lost_keys(row: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Return the keys of a row that are not read, for :attr:`Read.lost`."""
    return tuple(f"key {key!r}" for key, value in row.items() if key not in (*known, KEY) and value)


@dataclass(frozen=True, slots=True)
class DialogueFormat(Format):
    """A format of conversations.

    Attributes:
        parse: Returns the conversation of a row, or raises :class:`~afm.errors.DataError`.
        show: Returns the row of a conversation. ``None`` if the format cannot be written.
        keep: Writes the fields for which the format has no place into a row. :attr:`kept` reads them.
    """

    parse: Callable[[Any], Dialogue] = field(kw_only=True)
    show: Callable[[Dialogue, Record, Context], Any] | None = field(kw_only=True)
    keep: Callable[[Any, Mapping[str, Any]], None] = field(default=keep_aside, kw_only=True)

    @property
    def writable(self) -> bool:
        """Whether rows can be written."""
        return self.show is not None

    def read(self, row: Any, context: Context) -> Read:
        """Return the record of a row."""
        kept = self.kept(row) if self.kept is not None else {}
        parsed, shown = self._parsed(row, kept)
        spec = context.spec(kept.get("agent"))
        context.called.update(use.tool for turn in parsed.turns for use in turn.uses if use.tool)
        dialogue = renamed(parsed, context.tools)
        facts: dict[str, Any] = {"id": "", "agent": spec.name, "agent_digest": spec.digest, **dialogue.facts}
        segments = calls = None
        try:
            dialogue = as_read(dialogue, spec)
            context.unknown.update(_unknown_functions(dialogue, spec))
            segments = segments_of(dialogue, spec, missing_thought=context.missing_thought)
            calls = calls_of(dialogue, spec)
        except DataError:
            if "segments" not in kept:
                raise
            segments = None
        if not kept:
            facts |= _judged(segments or (), spec) | {
                "cost": _counted(facts.get("cost", Cost()), calls or ())
            }
        question = question_in(dialogue.question, spec)
        return Read(_restored(kept, question, segments, shown, calls=calls or (), **facts), dialogue.lost)

    def write(self, record: Record, context: Context) -> Any:
        """Return the row of a record."""
        if self.show is None:
            raise DataError("the format cannot be written, only read")
        spec = context.spec(record.agent)
        row = self.show(dialogue_of(record, spec), record, context)
        if context.bare or self.kept is None:
            return row
        self.keep(row, _aside(record))
        if missing := self._missing(row, record, spec):
            shown = self._parsed(row, dict.fromkeys(_SHOWN))[1]
            self.keep(row, _aside(record, missing, shown))
        return row

    def _parsed(self, row: Any, kept: Mapping[str, Any]) -> tuple[Dialogue, Any]:
        """Return the conversation of a row and the content of its digest, which is ``None`` if only ``kept`` has it."""
        try:
            dialogue = self.parse(row)
        except DataError:
            if "segments" not in kept:
                raise
            return Dialogue("", ()), None
        turns = [
            [
                turn.text,
                [[use.tool, use.arguments, use.result] for use in turn.uses],
                *([turn.thought] if turn.thought else []),
                *([{"result": turn.result}] if turn.result is not None else []),
            ]
            for turn in dialogue.turns
        ]
        return dialogue, [dialogue.question, turns]

    def _missing(self, row: Any, record: Record, spec: AgentSpec) -> tuple[str, ...]:
        """Return the fields that change in a round trip through the shown row."""
        try:
            back = self.read(row, Context(agent=spec)).record
        except DataError:
            return _SHOWN
        return tuple(name for name in _SHOWN if getattr(back, name) != getattr(record, name))


def _aside(record: Record, also: Collection[str] = (), shown: Any = None) -> dict[str, Any]:
    """Return the content of the key. ``also`` lists the fields that would change in a round trip through ``shown``."""
    rest = record.model_dump(mode="json", exclude=set(_SHOWN), exclude_defaults=True)
    if not also:
        return rest
    return rest | record.model_dump(mode="json", include=set(also)) | {_DIGEST: _digest(shown)}


def _restored(
    kept: Mapping[str, Any],
    question: str,
    segments: tuple[Segment, ...] | None,
    shown: Any,
    /,
    **fields: Any,
) -> Record:
    """Return the record of a row from the content of the key and what the row shows.

    Args:
        segments: ``None`` if the row shows no trajectory of its agent.
        fields: Further fields that the row shows.

    Raises:
        DataError: The content of the key is invalid.
    """
    rest = dict(kept)
    digest = rest.pop(_DIGEST, None)
    if digest is not None and digest != _digest(shown):
        rest = {key: value for key, value in rest.items() if key not in _SHOWN}
    if segments is None and "segments" not in rest:
        raise DataError(f"{KEY}: the row was changed, and it is no longer a trajectory of its agent")
    try:
        return Record.model_validate({"question": question, "segments": segments} | fields | rest)
    except ValidationError as error:
        raise DataError(f"{KEY}: {explain(error)}") from None


def _digest(shown: Any) -> str:
    text = json.dumps(shown, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _unknown_functions(dialogue: Dialogue, spec: AgentSpec) -> set[str]:
    """Return the functions that the programs for the agent's code tool call, but do not define."""
    programs = []
    for use in (use for turn in dialogue.turns for use in turn.uses):
        if CODE_TOOL in (use.tool, spec.tool_roles.get(use.tool)):
            with suppress(BadArgumentError):
                programs.append(parse_program(use.text()).code)
    return unknown_functions(programs)


def _counted(cost: Cost, calls: Collection[CallRecord]) -> Cost:
    """Return a cost with the number of tool calls and of those that are known to have failed."""
    return cost.model_copy(
        update={"tool_calls": len(calls), "tool_failures": sum(not call.ok for call in calls)}
    )


def _judged(segments: Sequence[Segment], spec: AgentSpec) -> dict[str, Any]:
    """Return the fields of a record that mark a trajectory which the agent's rules refuse."""
    faults = validate(segments, spec)
    return {"kept": False, "reason": f"format: {faults[0]}"} if faults else {}


class _RecordFormat(Format):
    """Records in their own form."""

    def read(self, row: Any, context: Context) -> Read:
        """Return the record of a row."""
        try:
            return Read(Record.model_validate(row))
        except ValidationError as error:
            raise DataError(explain(error).partition("; convert the file first")[0]) from None

    def write(self, record: Record, context: Context) -> Any:
        """Return all fields of a record."""
        return record.model_dump(mode="json")


COA = _RecordFormat("coa", lambda row: isinstance(row, dict) and "segments" in row, loses="")

ALPACA_KEYS = ("instruction", "input", "output")


class _AlpacaFormat(Format):
    """Rows with the whole response as one text, whose tags determine the authors."""

    def read(self, row: Any, context: Context) -> Read:
        """Return the record of a row."""
        row = row_object(row, ", ".join(ALPACA_KEYS))
        instruction, output = text_of(row, "instruction"), text_of(row, "output")
        more = row.get("input") or ""
        if not isinstance(more, str):
            raise DataError(f"input: got {json_word(more)}, expected a text")
        kept = kept_aside(row)
        spec = context.spec(kept.get("agent"))
        segments = author_segments(output, spec)
        facts: dict[str, Any] = {"id": row_id(row), "agent": spec.name, "agent_digest": spec.digest}
        if not kept:
            calls = sum(step.role in spec.tool_roles for step in split(output, spec).steps)
            facts |= _judged(segments, spec) | {"cost": Cost(tool_calls=calls)}
        question = question_in(f"{instruction}\n{more}" if more else instruction, spec)
        record = _restored(kept, question, segments, [instruction, more, output], **facts)
        return Read(record, lost_keys(row, (*ALPACA_KEYS, "id")))

    def write(self, record: Record, context: Context) -> Any:
        """Return the row of a record."""
        spec = context.spec(record.agent)
        row: dict[str, Any] = {
            "instruction": spec.user_message(record.question),
            "input": "",
            "output": record.text,
        }
        if context.bare:
            return row
        by_tags = [(part.author, part.text) for part in author_segments(record.text, spec)]
        same = [(part.author, part.text) for part in record.segments] == by_tags
        also = (*(() if same else ("segments",)), *(("calls",) if record.calls else ()))
        return {**row, KEY: _aside(record, also, [row["instruction"], "", row["output"]])}


ALPACA = _AlpacaFormat(
    "alpaca", lambda row: isinstance(row, dict) and "instruction" in row and "output" in row
)
