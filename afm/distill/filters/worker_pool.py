"""What any process can do for any row: lines in, decisions out; and the processes that do it, with the order kept."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context, parent_process

from afm.agents import AgentSpec
from afm.distill.filters.base import AtOnce, dropped
from afm.distill.filters.near_duplicates import Signer, Twin
from afm.distill.filters.registry import FilterPlan, build_stages
from afm.distill.filters.rules import Correction
from afm.distill.filters.state import Chunk
from afm.errors import AfmError, DataError, EngineError
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
class _StagedRow:
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


class FilterChain:
    """The stages of a plan, open in one process. Close it when done."""

    def __init__(self, plan: FilterPlan, spec: AgentSpec) -> None:
        self._stages = build_stages(plan, spec)
        self._correction = next((stage for stage in self._stages if isinstance(stage, Correction)), None)
        self._at_once = tuple(stage.apply if isinstance(stage, AtOnce) else None for stage in self._stages)
        self._runner = asyncio.Runner()

    def decide(self, lines: Sequence[bytes]) -> list[Decision]:
        """One decision a line, in their order."""
        decided = [self._decided(line) for line in lines]
        waiting = [row for row in decided if isinstance(row, _StagedRow)]
        if waiting:
            self._runner.run(self._all_ended(waiting))
        return [self._decision(entry) if isinstance(entry, _StagedRow) else entry for entry in decided]

    def close(self) -> None:
        """Free what the stages hold."""
        for stage in self._stages:
            close = getattr(stage, "close", None)
            if close is not None:
                self._runner.run(close())
        self._runner.close()

    def _decided(self, line: bytes) -> Decision | _StagedRow:
        """The decision, or the row as it waits for a stage. One row after the other: the stages share its :func:`split_of`."""
        try:
            record = record_of_line(line)
        except DataError as error:
            return Decision(error=error.message)
        row = _StagedRow(line, record, record)
        return self._decision(row) if self._advanced(row) else row

    def _advanced(self, row: _StagedRow) -> bool:
        """Whether the row needs to wait for nothing to reach its end, where it is then."""
        try:
            while row.record.kept and row.at < len(self._stages):
                stage, apply = self._stages[row.at], self._at_once[row.at]
                if isinstance(stage, Signer):
                    row.signature = stage.signature(row.record)
                elif (checked := None if apply is None else apply(row.record)) is None:
                    return False
                else:
                    row.record = checked
                row.at += 1
        except DataError as error:
            row.error = error.message
        return True

    async def _all_ended(self, rows: Sequence[_StagedRow]) -> None:
        rest = iter(rows)
        while batch := list(islice(rest, _PARALLEL)):
            await asyncio.gather(*map(self._ended, batch))

    async def _ended(self, row: _StagedRow) -> None:
        while not self._advanced(row):
            stage = self._stages[row.at]
            assert not isinstance(stage, Signer)
            try:
                row.record = await stage.check(row.record)
            except DataError as error:
                row.error = error.message
                return
            row.at += 1

    def _decision(self, row: _StagedRow) -> Decision:
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


Decided = tuple[Chunk, list[Decision]]
_WAITING_PER_PROCESS = 4
_CHUNKS_ALONE = 4
"""So much is done sooner than another process would be there."""
_IMPORTED = ["afm.distill.filters.worker_pool"]
"""By the fork server."""


def decided(chunks: Iterable[Chunk], plan: FilterPlan, spec: AgentSpec, processes: int) -> Iterator[Decided]:
    """Each chunk with the decisions about its lines, in the order of the chunks.

    This process is one of those that decide: it does so while the others start, and while all of them have enough to do.

    Raises:
        EngineError: A process died.
    """
    chain = FilterChain(plan, spec)
    rest = iter(chunks)
    try:
        for chunk in rest if processes == 1 else itertools.islice(rest, _CHUNKS_ALONE):
            yield chunk, chain.decide(chunk.lines)
        for chunk in rest:
            yield from _together(itertools.chain((chunk,), rest), chain, plan, spec, processes - 1)
    finally:
        chain.close()


def _together(
    chunks: Iterable[Chunk], chain: FilterChain, plan: FilterPlan, spec: AgentSpec, helpers: int
) -> Iterator[Decided]:
    context = get_context("forkserver")  # what the stages import is imported once for all helpers
    context.set_forkserver_preload(_IMPORTED)
    pool = ProcessPoolExecutor(helpers, mp_context=context, initializer=_begin, initargs=(plan, spec))
    starter = ThreadPoolExecutor(1)  # half a second in which this process can decide
    queue = _Queue(helpers, starter.submit(_started, pool))
    try:
        for chunk in chunks:
            while queue.head_is_due():
                yield queue.taken()
            if queue.has_room():
                queue.add(chunk, _submitted(pool, chunk.lines))
            else:
                queue.add(chunk, chain.decide(chunk.lines))
        while queue:
            yield queue.taken()
    except (BrokenProcessPool, _UnbuiltError) as error:
        raise EngineError(
            f"a filter process died ({error}), perhaps for want of memory; run the command again to continue, "
            "with fewer --processes"
        ) from error
    finally:
        starter.shutdown()
        pool.shutdown(cancel_futures=True)


def _started(pool: ProcessPoolExecutor) -> None:
    """Wait until the first process of the pool is ready."""
    _submitted(pool, ()).result()


def _submitted(pool: ProcessPoolExecutor, lines: tuple[bytes, ...]) -> Future[list[Decision]]:
    try:
        return pool.submit(_decide, lines)
    except (
        OSError,
        EOFError,
    ) as error:  # of starting a process: none may be forked, or the server that forks has died
        raise BrokenProcessPool(str(error)) from error


class _Queue:
    """The chunks under way, in their order."""

    def __init__(self, helpers: int, started: Future[None]) -> None:
        self._room = helpers * _WAITING_PER_PROCESS
        self._started = started
        self._waiting: deque[tuple[Chunk, Future[list[Decision]] | list[Decision]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, chunk: Chunk, decisions: Future[list[Decision]] | list[Decision]) -> None:
        """A chunk that is decided on, here or elsewhere."""
        self._waiting.append((chunk, decisions))

    def has_room(self) -> bool:
        """Whether helpers are there and one of them might wait for work."""
        return self._started.done() and self._under_way() < self._room

    def head_is_due(self) -> bool:
        """Whether the first chunk is done, or so many wait behind it that nothing else may be begun."""
        if not self._waiting:
            return False
        decisions = self._waiting[0][1]
        return isinstance(decisions, list) or decisions.done() or len(self._waiting) > 2 * self._room

    def taken(self) -> Decided:
        """The first chunk, as soon as it is done."""
        chunk, decisions = self._waiting.popleft()
        return chunk, decisions if isinstance(decisions, list) else decisions.result()

    def _under_way(self) -> int:
        return sum(isinstance(decisions, Future) and not decisions.done() for _, decisions in self._waiting)


_chain: list[FilterChain] = []
"""The chain of a worker process; empty elsewhere."""


class _UnbuiltError(Exception):
    """A worker has no chain; its own error may not survive the way between processes."""


def _begin(plan: FilterPlan, spec: AgentSpec) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops, and its workers with it
    with contextlib.suppress(AfmError):
        _chain.append(FilterChain(plan, spec))


def _end_with_parent() -> None:
    """The fork server is no help here: it lives on while a worker does, and a worker's parent is the server."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _decide(lines: tuple[bytes, ...]) -> list[Decision]:
    if not _chain:
        raise _UnbuiltError
    return _chain[0].decide(lines)
