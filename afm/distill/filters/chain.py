"""The part of a run that any process can do for any row: lines in, decisions out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from afm.agents import AgentSpec
from afm.distill.filters.base import AtOnce, dropped
from afm.distill.filters.correction import Correction
from afm.distill.filters.near_duplicates import Signer, Twin
from afm.distill.filters.plan import FilterPlan, build_stages
from afm.errors import DataError
from afm.trajectory.io import line_of_record, record_of_line
from afm.trajectory.record import Record

_PARALLEL = 32


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one line, as far as the line alone decides.

    Attributes:
        line: What is written, with its line feed; empty where :func:`written` makes it from the line read.
        copies: Further lines, written behind a kept one.
        signature: For the search for near duplicates; empty when no such stage is reached.
        error: The line is no record, and why; nothing else is set then.
        earlier: The row was dropped by an earlier run, with ``reason``.
    """

    id: str = ""
    kept: bool = False
    reason: str = ""
    line: bytes = b""
    copies: tuple[bytes, ...] = ()
    signature: bytes = b""
    error: str = ""
    earlier: bool = False


@dataclass(slots=True)
class _Row:
    """A record on its way through the stages.

    Attributes:
        at: The stage that it has reached.
    """

    line: bytes
    read: Record
    record: Record
    at: int = 0
    signature: bytes = b""
    error: str = ""


class Chain:
    """The stages of a plan, open in one process. Close it when done."""

    def __init__(self, plan: FilterPlan, spec: AgentSpec) -> None:
        self._stages = build_stages(plan, spec)
        self._correction = next((stage for stage in self._stages if isinstance(stage, Correction)), None)
        self._at_once = tuple(stage.apply if isinstance(stage, AtOnce) else None for stage in self._stages)
        self._runner = asyncio.Runner()

    def decide(self, lines: Sequence[bytes]) -> list[Decision]:
        """One decision a line, in their order."""
        decided = [self._decided(line) for line in lines]
        waiting = [row for row in decided if isinstance(row, _Row)]
        if waiting:
            self._runner.run(self._all_ended(waiting))
        return [self._decision(found) if isinstance(found, _Row) else found for found in decided]

    def close(self) -> None:
        """Free what the stages hold."""
        for stage in self._stages:
            close = getattr(stage, "close", None)
            if close is not None:
                self._runner.run(close())
        self._runner.close()

    def _decided(self, line: bytes) -> Decision | _Row:
        """The decision, or the row as it waits for a stage. One row after the other: the stages share its :func:`split_of`."""
        try:
            record = record_of_line(line)
        except DataError as error:
            return Decision(error=error.message)
        row = _Row(line, record, record)
        return self._decision(row) if self._advanced(row) else row

    def _advanced(self, row: _Row) -> bool:
        """Whether the row needs to wait for nothing to reach its end, where it is then."""
        try:
            while row.record.kept and row.at < len(self._stages):
                stage, apply = self._stages[row.at], self._at_once[row.at]
                if isinstance(stage, Signer):
                    row.signature = stage.signature(row.record)
                elif (found := None if apply is None else apply(row.record)) is None:
                    return False
                else:
                    row.record = found
                row.at += 1
        except DataError as error:
            row.error = error.message
        return True

    async def _all_ended(self, rows: Sequence[_Row]) -> None:
        rest = iter(rows)
        while batch := list(islice(rest, _PARALLEL)):
            await asyncio.gather(*map(self._ended, batch))

    async def _ended(self, row: _Row) -> None:
        while not self._advanced(row):
            stage = self._stages[row.at]
            assert not isinstance(stage, Signer)
            try:
                row.record = await stage.check(row.record)
            except DataError as error:
                row.error = error.message
                return
            row.at += 1

    def _decision(self, row: _Row) -> Decision:
        if row.error:
            return Decision(error=row.error)
        record = row.record
        copies = self._correction.copies(record) if self._correction is not None and record.kept else ()
        return Decision(
            id=row.read.identity,
            kept=record.kept,
            reason=record.reason,
            line=b"" if record is row.read else _line(record, row.read, row.line),
            copies=tuple(map(line_of_record, copies)),
            signature=row.signature,
            earlier=not row.read.kept,
        )


_KEPT_END = b'"kept":true,"reason":"","error":""}\n'
"""How the line of a kept record ends as we write it; a single brace behind it, so it is the record's own."""


def _line(record: Record, read: Record, line: bytes) -> bytes:
    """The line of a changed record; empty for one that was only dropped, see :func:`written`."""
    same = (
        record.segments is read.segments
        and record.verdict is read.verdict
        and record.provenance is read.provenance
    )
    if record.kept or not same or not line.endswith(_KEPT_END):
        return line_of_record(record)
    return b""


def written(decision: Decision, line: bytes) -> bytes:
    """What is written of a line that was read: as it is, changed, or with a reason as its end.

    A row that was dropped before it came here stays as it is: it has its reason.
    """
    if decision.line:
        return decision.line
    if not decision.kept and line.endswith(_KEPT_END):
        return _with_reason(line, decision.reason)
    return line if line.endswith(b"\n") else line + b"\n"


def _with_reason(line: bytes, reason: str) -> bytes:
    text = json.dumps(reason, ensure_ascii=False).encode()
    return b"".join((line[: -len(_KEPT_END)], b'"kept":false,"reason":', text, b',"error":""}\n'))


def dropped_as_twin(line: bytes, twin: Twin) -> tuple[str, bytes]:
    """The reason and the line of a record that nearly repeats an earlier one.

    Args:
        line: The record as the other stages left it.
    """
    reason = f"{Signer.name}: {twin.similarity:.2f} similar to {twin.id!r}"
    if line.endswith(_KEPT_END):
        return reason, _with_reason(line, reason)
    return reason, line_of_record(dropped(record_of_line(line), reason))
