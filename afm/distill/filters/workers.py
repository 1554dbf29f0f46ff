"""The chunks of a run, decided on in one process or in several; the order stays the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process

from afm.agents import AgentSpec
from afm.distill.filters.chain import Chain, Decision
from afm.distill.filters.plan import FilterPlan
from afm.distill.filters.source import Chunk
from afm.errors import AfmError, EngineError

Decided = tuple[Chunk, list[Decision]]
_WAITING_PER_PROCESS = 4
_CHUNKS_ALONE = 4
"""So much is done sooner than another process would be there."""
_IMPORTED = ["afm.distill.filters.chain"]
"""By the fork server."""


def decided(chunks: Iterable[Chunk], plan: FilterPlan, spec: AgentSpec, processes: int) -> Iterator[Decided]:
    """Each chunk with the decisions about its lines, in the order of the chunks.

    This process is one of those that decide: it does so while the others start, and while all of them have enough to do.

    Raises:
        EngineError: A process died.
    """
    chain = Chain(plan, spec)
    rest = iter(chunks)
    try:
        for chunk in rest if processes == 1 else itertools.islice(rest, _CHUNKS_ALONE):
            yield chunk, chain.decide(chunk.lines)
        for chunk in rest:
            yield from _together(itertools.chain((chunk,), rest), chain, plan, spec, processes - 1)
    finally:
        chain.close()


def _together(
    chunks: Iterable[Chunk], chain: Chain, plan: FilterPlan, spec: AgentSpec, helpers: int
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

    def add(self, chunk: Chunk, found: Future[list[Decision]] | list[Decision]) -> None:
        """A chunk that is decided on, here or elsewhere."""
        self._waiting.append((chunk, found))

    def has_room(self) -> bool:
        """Whether helpers are there and one of them might wait for work."""
        return self._started.done() and self._under_way() < self._room

    def head_is_due(self) -> bool:
        """Whether the first chunk is done, or so many wait behind it that nothing else may be begun."""
        if not self._waiting:
            return False
        found = self._waiting[0][1]
        return isinstance(found, list) or found.done() or len(self._waiting) > 2 * self._room

    def taken(self) -> Decided:
        """The first chunk, as soon as it is done."""
        chunk, found = self._waiting.popleft()
        return chunk, found if isinstance(found, list) else found.result()

    def _under_way(self) -> int:
        return sum(isinstance(found, Future) and not found.done() for _, found in self._waiting)


_chain: list[Chain] = []
"""The chain of a worker process; empty elsewhere."""


class _UnbuiltError(Exception):
    """A worker has no chain; its own error may not survive the way between processes."""


def _begin(plan: FilterPlan, spec: AgentSpec) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops, and its workers with it
    with contextlib.suppress(AfmError):
        _chain.append(Chain(plan, spec))


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
