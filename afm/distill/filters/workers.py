"""The chunks of a run, decided on in one process or in several; the order stays the same."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process

from afm.agents import AgentSpec
from afm.distill.filters.chain import Chain, Decision
from afm.distill.filters.plan import FilterPlan
from afm.distill.filters.source import Chunk
from afm.errors import AfmError, EngineError

Decided = tuple[Chunk, list[Decision]]
_WAITING_PER_PROCESS = 2
_IMPORTED = ["afm.distill.filters.chain", "datasketch", "py3langid.langid"]
"""By the fork server; what is not installed is passed over."""


def decided(chunks: Iterable[Chunk], plan: FilterPlan, spec: AgentSpec, processes: int) -> Iterator[Decided]:
    """Each chunk with the decisions about its lines, in the order of the chunks.

    With one process, no other is started.

    Raises:
        EngineError: A process died.
    """
    return _alone(chunks, plan, spec) if processes == 1 else _together(chunks, plan, spec, processes)


def _alone(chunks: Iterable[Chunk], plan: FilterPlan, spec: AgentSpec) -> Iterator[Decided]:
    chain = Chain(plan, spec)
    try:
        for chunk in chunks:
            yield chunk, chain.decide(chunk.lines)
    finally:
        chain.close()


def _together(
    chunks: Iterable[Chunk], plan: FilterPlan, spec: AgentSpec, processes: int
) -> Iterator[Decided]:
    context = get_context("forkserver")  # what the stages import is imported once for all workers
    context.set_forkserver_preload(_IMPORTED)
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(plan, spec))
    waiting: deque[tuple[Chunk, Future[list[Decision]]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_decide, chunk.lines)))
            if len(waiting) > processes * _WAITING_PER_PROCESS:
                yield _next(waiting)
        while waiting:
            yield _next(waiting)
    except (BrokenProcessPool, _UnbuiltError) as error:
        Chain(plan, spec).close()  # a stage that cannot be built says here why
        raise EngineError(
            f"a filter process died ({error}), perhaps for want of memory; run the command again to continue, "
            "with fewer --processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _next(waiting: deque[tuple[Chunk, Future[list[Decision]]]]) -> Decided:
    chunk, future = waiting.popleft()
    return chunk, future.result()


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
