"""The part of a run that any process can do for any row: lines in, decisions out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from afm.agents import AgentSpec
from afm.distill.filters.base import Filter, Rule, dropped
from afm.distill.filters.correction import Correction
from afm.distill.filters.near_duplicates import Signer, Twin
from afm.distill.filters.plan import FilterPlan, Stage, build_stages
from afm.distill.filters.stream import pass_filters
from afm.errors import DataError
from afm.trajectory.io import line_of_record, record_of_line
from afm.trajectory.record import Record

_PARALLEL = 32


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one line, as far as the line alone decides.

    Attributes:
        line: What is written, with its line feed; empty where the line read is written as it is.
        copies: Further lines, written behind a kept one.
        signature: For the search for near duplicates; empty when no such stage is reached.
        error: The line is no record, and why; nothing else is set then.
    """

    id: str = ""
    kept: bool = False
    reason: str = ""
    line: bytes = b""
    copies: tuple[bytes, ...] = ()
    signature: bytes = b""
    error: str = ""


class Chain:
    """The stages of a plan, open in one process. Close it when done."""

    def __init__(self, plan: FilterPlan, spec: AgentSpec) -> None:
        stages = build_stages(plan, spec)
        self._signer = next((stage for stage in stages if isinstance(stage, Signer)), None)
        self._before, self._behind = _split(stages)
        self._correction = next((stage for stage in stages if isinstance(stage, Correction)), None)
        self._filters = (*self._before, *self._behind)
        self._waits = not all(isinstance(stage, Rule | Correction) for stage in self._filters)
        self._runner = asyncio.Runner()

    def decide(self, lines: Sequence[bytes]) -> list[Decision]:
        """One decision a line, in their order."""
        return self._runner.run(self._decide_all(lines))

    def close(self) -> None:
        """Free what the stages hold."""
        for stage in self._filters:
            close = getattr(stage, "close", None)
            if close is not None:
                self._runner.run(close())
        self._runner.close()

    async def _decide_all(self, lines: Iterable[bytes]) -> list[Decision]:
        if not self._waits:
            return [await self._decide(line) for line in lines]
        decisions: list[Decision] = []
        rest = iter(lines)
        while batch := list(islice(rest, _PARALLEL)):
            decisions += await asyncio.gather(*map(self._decide, batch))
        return decisions

    async def _decide(self, line: bytes) -> Decision:
        try:
            return await self._judged(record_of_line(line), line)
        except DataError as error:
            return Decision(error=error.message)

    async def _judged(self, read: Record, line: bytes) -> Decision:
        record, signature = await pass_filters(read, self._before), b""
        if self._signer is not None and record.kept:
            signature = self._signer.signature(record)
            record = await pass_filters(record, self._behind)
        copies = self._correction.copies(record) if self._correction is not None and record.kept else ()
        return Decision(
            id=read.id,
            kept=record.kept,
            reason=record.reason,
            line=b"" if record is read else _line(record, read, line),
            copies=tuple(map(line_of_record, copies)),
            signature=signature,
        )


def _split(stages: Sequence[Stage]) -> tuple[tuple[Filter, ...], tuple[Filter, ...]]:
    """What stands before the search for near duplicates, and what stands behind it."""
    place = next((at for at, stage in enumerate(stages) if isinstance(stage, Signer)), len(stages))
    before = tuple(stage for stage in stages[:place] if not isinstance(stage, Signer))
    return before, tuple(stage for stage in stages[place + 1 :] if not isinstance(stage, Signer))


_KEPT_END = b'"kept":true,"reason":"","error":""}\n'
"""How the line of a kept record ends as we write it; a single brace behind it, so it is the record's own."""


def _line(record: Record, read: Record, line: bytes) -> bytes:
    """The line of a changed record; of one that was only dropped, the line read with another end."""
    same = (
        record.segments is read.segments
        and record.verdict is read.verdict
        and record.provenance is read.provenance
    )
    if record.kept or not same or not line.endswith(_KEPT_END):
        return line_of_record(record)
    return _with_reason(line, record.reason)


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
