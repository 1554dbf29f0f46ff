"""Decisions about lines, made in any number of processes. Files are read in chunks, whose order is kept."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import os
import signal
import threading
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import BinaryIO, cast

from afm.agents import AgentSpec
from afm.distill.filters.near_duplicates import Signer
from afm.distill.filters.registry import FilterPlan, build_stages
from afm.distill.filters.rules import Correction
from afm.errors import AfmError, ConfigError, DataError, EngineError, location
from afm.trajectory.io import line_of_record, record_of_line

_PARALLEL = 32


_CHUNK_BYTES = 1 << 20
_MOST_LINE_BYTES = 64 << 20
_CHUNK_ROWS = 512


@dataclass(frozen=True, slots=True)
class FilePosition:
    """A position between two lines: the 0-based number of the file, and the (unpacked) bytes and lines before it."""

    file: int = 0
    offset: int = 0
    line: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive lines of one file.

    Attributes:
        lines: Lines with their line feeds, which the last one of a file may lack. Blank lines are left out.
        numbers: Their 1-based numbers in the file.
        end: Position after the last line.
    """

    path: Path
    lines: tuple[bytes, ...]
    numbers: tuple[int, ...]
    end: FilePosition


def read_chunks(paths: Sequence[Path], begin: FilePosition) -> Iterator[Chunk]:
    """Yield all lines from ``begin`` on in chunks of about 1 MiB. A file whose name ends in ``.gz`` is unpacked.

    Raises:
        DataError: A file cannot be read.
    """
    place = begin
    for number in range(begin.file, len(paths)):
        if number != place.file:
            place = FilePosition(number)
        try:
            with _opened(paths[number]) as file:
                file.seek(place.offset)
                while (chunk := _next_chunk(file, paths[number], place)) is not None:
                    place = chunk.end
                    yield chunk
        except (OSError, EOFError) as error:
            raise DataError(f"cannot be read: {error}", path=str(paths[number])) from None


def _opened(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _next_chunk(file: BinaryIO, path: Path, begin: FilePosition) -> Chunk | None:
    lines: list[bytes] = []
    numbers: list[int] = []
    size = read = 0
    while size < _CHUNK_BYTES and read < _CHUNK_ROWS:
        line = file.readline(_MOST_LINE_BYTES + 1)
        if not line:
            break
        if len(line) > _MOST_LINE_BYTES:
            text = f"a line of more than {_MOST_LINE_BYTES >> 20} MiB; take it out, or unpack the file and look at it"
            raise DataError(text, path=str(path), line=begin.line + read + 1)
        size += len(line)
        read += 1
        row = line.removeprefix(BOM_UTF8)
        if row.strip():
            lines.append(row)
            numbers.append(begin.line + read)
    if not read:
        return None
    end = FilePosition(begin.file, begin.offset + size, begin.line + read)
    return Chunk(path, tuple(lines), tuple(numbers), end)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one line, as far as it depends only on that line.

    Attributes:
        line: Replaces the line that was read, including its line feed. Empty if the line is unchanged.
        copies: Additional lines, written after a kept one.
        signature: For the search for near duplicates. Empty if the row does not reach such a stage.
        error: Why the line is not a record. No other field is set then.
        earlier: Whether an earlier run dropped the row, with ``reason``.
        other: The agent that the row names, if it is not the agent of the run.
    """

    id: str = ""
    kept: bool = False
    reason: str = ""
    line: bytes = b""
    copies: tuple[bytes, ...] = ()
    signature: bytes = b""
    error: str = ""
    earlier: bool = False
    other: str = ""


class FilterChain:
    """The stages of a plan, open in one process. Close it when done."""

    def __init__(self, plan: FilterPlan, spec: AgentSpec) -> None:
        self._stages = build_stages(plan, spec)
        self._agent = spec.name
        self._correction = next((stage for stage in self._stages if isinstance(stage, Correction)), None)
        self._runner = asyncio.Runner()

    def decide(self, chunk: Chunk) -> list[Decision]:
        """Return one decision per line, in order.

        Raises:
            ConfigError: The settings do not suit a row, for example its data source has no reward.
        """
        return self._runner.run(self._decide(chunk))

    def close(self) -> None:
        """Close the stages."""
        for stage in self._stages:
            close = getattr(stage, "close", None)
            if close is not None:
                self._runner.run(close())
        self._runner.close()

    async def _decide(self, chunk: Chunk) -> list[Decision]:
        decisions: list[Decision] = []
        rest = zip(chunk.lines, chunk.numbers, strict=True)
        while batch := list(islice(rest, _PARALLEL)):
            decisions += await asyncio.gather(*(self._decide_line(chunk.path, *row) for row in batch))
        return decisions

    async def _decide_line(self, path: Path, line: bytes, number: int) -> Decision:
        """Decide about one line. Stages that do not wait process one row at a time, so they share its :func:`split_of`."""
        signature = b""
        try:
            read = record = record_of_line(line, path)
            for stage in self._stages:
                if not record.kept:
                    break
                if isinstance(stage, Signer):
                    signature = stage.signature(record)
                else:
                    record = await stage.check(record)
        except DataError as error:
            return Decision(error=error.message)
        except ConfigError as error:
            raise ConfigError(f"{location(str(path), number)}{error}") from None
        copies = self._correction.copies(record) if self._correction is not None and record.kept else ()
        return Decision(
            id=read.identity,
            kept=record.kept,
            reason=record.reason,
            line=b"" if record is read else line_of_record(record),
            copies=tuple(map(line_of_record, copies)),
            signature=signature,
            earlier=not read.kept,
            other="" if read.agent == self._agent else read.agent,
        )


_WAITING_PER_PROCESS = 4
_CHUNKS_ALONE = 4
"""Number of chunks that this process decides about. They take less time than the start of another process."""


def decided(
    chunks: Iterable[Chunk], plan: FilterPlan, spec: AgentSpec, processes: int
) -> Iterator[tuple[Chunk, list[Decision]]]:
    """Yield each chunk in order with the decisions about its lines. This process decides about the first chunks.

    Raises:
        EngineError: A process died.
    """
    chain = FilterChain(plan, spec)
    rest = iter(chunks)
    try:
        for chunk in rest if processes == 1 else islice(rest, _CHUNKS_ALONE):
            yield chunk, chain.decide(chunk)
    finally:
        chain.close()
    for chunk in rest:
        yield from _decided_elsewhere(itertools.chain((chunk,), rest), plan, spec, processes)


def _decided_elsewhere(
    chunks: Iterable[Chunk], plan: FilterPlan, spec: AgentSpec, processes: int
) -> Iterator[tuple[Chunk, list[Decision]]]:
    context = get_context("forkserver")  # imports of the stages are loaded once for all processes
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(plan, spec))
    waiting: deque[tuple[Chunk, Future[list[Decision]]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_decide, chunk)))
            if len(waiting) > processes * _WAITING_PER_PROCESS:
                first, decisions = waiting.popleft()
                yield first, decisions.result()
        for first, decisions in waiting:
            yield first, decisions.result()
    except (
        BrokenProcessPool,
        _UnbuiltError,
        OSError,
        EOFError,
    ) as error:  # the last two: no process can be forked
        raise EngineError(
            f"a filter process died ({error}), perhaps because it ran out of memory; run the command again to resume, "
            "with fewer --processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_chain: list[FilterChain] = []
"""The chain of a worker process. Empty in other processes."""


class _UnbuiltError(Exception):
    """A worker has no chain. Its original error cannot always be sent to another process."""


def _begin(plan: FilterPlan, spec: AgentSpec) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    with contextlib.suppress(AfmError):
        _chain.append(FilterChain(plan, spec))


def _end_with_parent() -> None:
    """Kill this worker when the main process ends. The fork server, a worker's parent, does not end before its workers."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _decide(chunk: Chunk) -> list[Decision]:
    if not _chain:
        raise _UnbuiltError
    return _chain[0].decide(chunk)
