"""Queries of requests that wait at the same time are searched together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tool_servers.wiki_search.hits import Engine
from tool_servers.wiki_search.passages import PassageStore


@dataclass(frozen=True, slots=True)
class _Asked:
    queries: tuple[str, ...]
    k: int
    scored: bool
    answer: asyncio.Future[bytes]


class Batcher:
    """Searches in worker threads, for many requests in one call.

    Args:
        most: Queries of one call; a request with more is one call of its own.
        threads: Calls at the same time.
    """

    def __init__(self, engine: Engine, store: PassageStore, *, most: int, threads: int) -> None:
        self._engine, self._store, self._most = engine, store, most
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="search")
        self._queue: asyncio.Queue[_Asked] = asyncio.Queue()
        self._workers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to work, in the running event loop."""
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._threads)]

    async def stop(self) -> None:
        """End the workers; what they had begun ends first."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._pool.shutdown()

    async def search(self, queries: Sequence[str], k: int, *, scored: bool) -> bytes:
        """The JSON list of results, one list of passages a query.

        Args:
            scored: Whether each passage comes as ``{"document", "score"}`` or alone.

        Raises:
            Exception: Whatever the engine raised.
        """
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Asked(tuple(queries), k, scored, answer))
        return await answer

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            size = len(batch[0].queries)
            while size < self._most and not self._queue.empty():
                batch.append(self._queue.get_nowait())
                size += len(batch[-1].queries)
            batch = [asked for asked in batch if not asked.answer.done()]
            for k in sorted({asked.k for asked in batch}):
                group = [asked for asked in batch if asked.k == k]
                await self._answer(loop, group, k)

    async def _answer(self, loop: asyncio.AbstractEventLoop, group: list[_Asked], k: int) -> None:
        try:
            texts = await loop.run_in_executor(self._pool, self._searched, group, k)
        except Exception as error:  # noqa: BLE001  the border between requests and the engine
            for asked in group:
                if not asked.answer.done():
                    asked.answer.set_exception(error)
            return
        for asked, text in zip(group, texts, strict=True):
            if not asked.answer.done():
                asked.answer.set_result(text)

    def _searched(self, group: Sequence[_Asked], k: int) -> list[bytes]:
        # Equal queries, as the samples of one RL group send them, are searched once.
        distinct = list(dict.fromkeys(query for asked in group for query in asked.queries))
        found = dict(zip(distinct, self._engine.search(distinct, k), strict=True))
        return [self._rendered([found[query] for query in asked.queries], asked.scored) for asked in group]

    def _rendered(self, results: Sequence[Sequence[tuple[int, float]]], scored: bool) -> bytes:
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
