"""Search in an index folder: open its engines, fuse their rankings, and search for many requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from afm.errors import ConfigError
from tool_servers.wiki_search.index import Hits, IndexManifest, PassageStore, checked_manifest

_RANK_OFFSET = 60


class Engine(Protocol):
    """Finds passages. Several worker threads may call it at the same time."""

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Return the best ``k`` passages for each query, best first."""
        ...


def fused(rankings: Sequence[Hits], k: int) -> Hits:
    """Fuse rankings by reciprocal rank (Cormack, Clarke and Buettcher 2009): sum ``1 / (60 + rank)``, ranks from 1."""
    scores: dict[int, float] = {}
    for hits in rankings:
        for rank, (passage, _) in enumerate(hits, 1):
            scores[passage] = scores.get(passage, 0.0) + 1 / (_RANK_OFFSET + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:k]


class Hybrid:
    """Several engines whose rankings are fused."""

    def __init__(self, engines: Sequence[Engine], depth: int = 50) -> None:
        self._engines, self._depth = engines, depth

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Return the best ``k`` passages for each query."""
        results = [engine.search(queries, max(k, self._depth)) for engine in self._engines]
        return [fused(rankings, k) for rankings in zip(*results, strict=True)]


@dataclass(frozen=True, slots=True)
class Index:
    """An open index.

    Attributes:
        engine_name: ``bm25``, ``dense`` or ``hybrid``.
    """

    manifest: IndexManifest
    store: PassageStore
    engine: Engine
    engine_name: str


def open_index(
    folder: Path,
    engine: str = "auto",
    *,
    model: str | None = None,
    device: str | None = None,
    verify: bool = False,
) -> Index:
    """Check an index and open the parts that ``engine`` needs, memory-mapped.

    Args:
        verify: Read every byte of the index and compare checksums.

    Raises:
        DataError: The index is unfinished, truncated, or mixed from different builds.
        ConfigError: The index lacks the part that ``engine`` needs.
    """
    manifest = checked_manifest(folder, whole=verify)
    name = served_engine(folder, manifest, engine)
    store = PassageStore(folder, expected=manifest.passages)
    parts: list[Engine] = []
    if name in ("bm25", "hybrid"):
        from tool_servers.wiki_search.bm25 import Bm25

        parts.append(Bm25(folder))
    if name in ("dense", "hybrid"):
        assert manifest.dense is not None
        from tool_servers.wiki_search.dense import Dense

        parts.append(Dense(folder, manifest.dense, manifest.passages, model=model, device=device))
    return Index(manifest, store, parts[0] if len(parts) == 1 else Hybrid(parts), name)


def served_engine(folder: Path, manifest: IndexManifest, engine: str) -> str:
    """Return the engine to use: ``bm25``, ``dense`` or ``hybrid``.

    Raises:
        ConfigError: The index lacks a part that the engine needs; the message has the command that adds it.
    """
    name = engine if engine != "auto" else "bm25" if manifest.bm25 else "dense"
    if name != "dense" and manifest.bm25 is None:
        raise ConfigError(
            f"{folder}: has no BM25 part; add it: afm serve wiki build CORPUS --engine bm25 --output-dir {folder}"
        )
    if name != "bm25" and manifest.dense is None:
        raise ConfigError(
            f"{folder}: has no dense part; add it: afm serve wiki build CORPUS --engine dense --model M --output-dir {folder}"
        )
    return name


@dataclass(frozen=True, slots=True)
class _Batched:
    queries: tuple[str, ...]
    k: int
    scored: bool
    answer: asyncio.Future[bytes]


class Batcher:
    """Searches in worker threads, for many requests in one call.

    Args:
        most: Queries of one call; a larger request gets a call of its own.
        threads: Number of calls at the same time.
    """

    def __init__(self, engine: Engine, store: PassageStore, *, most: int, threads: int) -> None:
        self._engine, self._store, self._most = engine, store, most
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="search")
        self._queue: asyncio.Queue[_Batched] = asyncio.Queue()
        self._workers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the workers in the running event loop."""
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._threads)]

    async def stop(self) -> None:
        """Stop the workers after their running searches."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._pool.shutdown()

    async def search(self, queries: Sequence[str], k: int, *, scored: bool) -> bytes:
        """Return the results as a JSON list with one list of passages per query.

        Args:
            scored: Return ``{"document", "score"}`` instead of only the passage.

        Raises:
            Exception: The error of the engine.
        """
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Batched(tuple(queries), k, scored, answer))
        return await answer

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            size = len(batch[0].queries)
            while size < self._most and not self._queue.empty():
                batch.append(self._queue.get_nowait())
                size += len(batch[-1].queries)
            batch = [request for request in batch if not request.answer.done()]
            for k in sorted({request.k for request in batch}):
                group = [request for request in batch if request.k == k]
                await self._answer(loop, group, k)

    async def _answer(self, loop: asyncio.AbstractEventLoop, group: list[_Batched], k: int) -> None:
        try:
            texts = await loop.run_in_executor(self._pool, self._searched, group, k)
        except Exception as error:  # noqa: BLE001  one engine error must not end the worker
            for request in group:
                if not request.answer.done():
                    request.answer.set_exception(error)
            return
        for request, text in zip(group, texts, strict=True):
            if not request.answer.done():
                request.answer.set_result(text)

    def _searched(self, group: Sequence[_Batched], k: int) -> list[bytes]:
        # The samples of an RL group send equal queries, which are searched once.
        distinct = list(dict.fromkeys(query for request in group for query in request.queries))
        hits = dict(zip(distinct, self._engine.search(distinct, k), strict=True))
        return [self._render([hits[query] for query in request.queries], request.scored) for request in group]

    def _render(self, results: Sequence[Sequence[tuple[int, float]]], scored: bool) -> bytes:
        lists = []
        for hits in results:
            if scored:
                parts = [
                    b'{"document":%b,"score":%a}' % (self._store.raw(passage), score)
                    for passage, score in hits
                ]
            else:
                parts = [self._store.raw(passage) for passage, _ in hits]
            lists.append(b"[" + b",".join(parts) + b"]")
        return b"[" + b",".join(lists) + b"]"
