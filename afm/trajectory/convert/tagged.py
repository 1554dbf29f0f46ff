"""Formats whose rows hold a trajectory as its tagged text: our own record JSONL and alpaca rows."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ValidationError

from afm.errors import DataError
from afm.trajectory.chat import row_id, text_of
from afm.trajectory.convert.base import KEY, Context, Format, Read, aside, judged, kept_aside, restored
from afm.trajectory.convert.dialogue import question_in
from afm.trajectory.io import explain
from afm.trajectory.record import Cost, Record, TextSegment
from afm.trajectory.tags import author_segments, split


class Coa(Format):
    """One record a line."""

    name: ClassVar[str] = "coa"

    def known(self, row: Any) -> bool:
        """See :class:`Format`."""
        return isinstance(row, dict) and "segments" in row

    def read(self, row: Any, context: Context) -> Read:
        """See :class:`Format`."""
        try:
            return Read(Record.model_validate(row))
        except ValidationError as error:
            raise DataError(explain(error)) from None

    def write(self, record: Record, context: Context) -> Any:
        """See :class:`Format`."""
        return record.model_dump(mode="json")


ALPACA_KEYS = ("instruction", "input", "output")


class Alpaca(Format):
    """The authors come from the tags."""

    name: ClassVar[str] = "alpaca"
    loses: ClassVar[str] = "id, gold answer, verdict, cost and provenance"

    def known(self, row: Any) -> bool:
        """See :class:`Format`."""
        return isinstance(row, dict) and "instruction" in row and "output" in row

    def read(self, row: Any, context: Context) -> Read:
        """See :class:`Format`."""
        if not isinstance(row, dict):
            raise DataError(f"got {type(row).__name__}, expected an object with {', '.join(ALPACA_KEYS)}")
        instruction, output = text_of(row, "instruction"), text_of(row, "output")
        more = row.get("input") or ""
        if not isinstance(more, str):
            raise DataError(f"input: got {type(more).__name__}, expected a text")
        kept = kept_aside(row)
        spec = context.spec(kept.get("agent"))
        found = author_segments(output, spec)
        segments = tuple(TextSegment(author=segment.author, text=segment.text) for segment in found)
        facts: dict[str, Any] = {
            "id": row_id(row),
            "agent": spec.name,
            "agent_digest": spec.digest,
        }
        if not kept:
            called = sum(step.role in spec.tool_roles for step in split(output, spec).steps)
            facts |= judged(segments, spec) | {"cost": Cost(tool_calls=called)}
        question = question_in(f"{instruction}\n{more}" if more else instruction, spec)
        known = {*ALPACA_KEYS, "id", KEY}
        lost = tuple(f"key {key!r}" for key, value in row.items() if key not in known and value)
        return Read(restored(kept, question, segments, [instruction, more, output], **facts), lost)

    def write(self, record: Record, context: Context) -> Any:
        """See :class:`Format`."""
        spec = context.spec(record.agent)
        row: dict[str, Any] = {
            "instruction": spec.user_message(record.question),
            "input": "",
            "output": record.text,
        }
        if context.bare:
            return row
        found = author_segments(record.text, spec)
        same = [(part.author, part.text) for part in record.segments] == [
            (part.author, part.text) for part in found
        ]
        also = (*(() if same else ("segments",)), *(("calls",) if record.calls else ()))
        return {**row, KEY: aside(record, also, [row["instruction"], "", row["output"]])}
