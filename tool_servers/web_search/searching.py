"""Searching for an agent: cache, budget of its run, provider."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from afm.errors import DataError
from tool_servers.shared.cache import Cache
from tool_servers.shared.metrics import Count
from tool_servers.shared.upstream import Trouble, UpstreamError
from tool_servers.web_search.providers import Hit, Provider, SearchSettings


class SearchRequest(BaseModel):
    """The body of ``POST /search``, as Serper has it; unknown keys are passed over.

    Attributes:
        q: The query.
        num: Results wanted; the server's default when absent.
        run: Name of the run whose budget pays for it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    q: str = Field(min_length=1)
    num: int | None = Field(default=None, ge=1)
    run: str = Field(default="", max_length=200)


class Searcher:
    """Answers searches; equal ones at the same time are sent to the provider once.

    Args:
        results: Results of a search that does not say how many it wants.
    """

    def __init__(self, provider: Provider, cache: Cache, settings: SearchSettings, results: int) -> None:
        self._provider = provider
        self._cache = cache
        self._settings = settings
        self._results = results
        self._under_way: dict[str, asyncio.Task[list[Hit]]] = {}
        self.searches = Count(
            "afm_search_searches_total",
            "Searches, by how they were answered.",
            "how",
            ("provider", "cache", *Trouble),
        )

    async def answer(self, asked: SearchRequest) -> dict[str, Any]:
        """Results in Serper's form.

        Raises:
            DataError: The query is too long.
            UpstreamError: The provider gave none, or the run's budget is spent.
        """
        query = " ".join(asked.q.split())
        if len(query) > self._settings.max_query_chars:
            most = self._settings.max_query_chars
            message = f"the query has {len(query)} characters, expected at most {most}"
            raise DataError(message)
        count = min(asked.num or self._results, self._settings.max_results)
        try:
            hits, cached = await self._hits(query, count, asked.run)
        except UpstreamError as error:
            self.searches.add(error.trouble)
            raise
        self.searches.add("cache" if cached else "provider")
        return {
            "searchParameters": {"q": query, "num": count, "engine": self._provider.name},
            "organic": [asdict(hit) | {"position": place} for place, hit in enumerate(hits, 1)],
            "cached": cached,
        }

    async def close(self) -> None:
        """End what is under way, close everything."""
        tasks = tuple(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._provider.close()
        await self._cache.close()

    async def _hits(self, query: str, count: int, run: str) -> tuple[list[Hit], bool]:
        """The results, and whether they were known or on their way already."""
        about = f"{self._provider.name}\0{count}\0{query}".encode("utf-8", "replace")
        key = hashlib.sha256(about).hexdigest()
        kept = await self._cache.get(f"search:{key}")
        if kept is not None and (hits := _hits_in(kept)) is not None:
            return hits, True
        task = self._under_way.get(key)
        known = task is not None
        if task is None:
            task = asyncio.create_task(self._searched(query, count, run, key))
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        # A waiter that is cancelled takes nothing from the others; what was paid for still gets into the cache.
        return await asyncio.shield(task), known

    async def _searched(self, query: str, count: int, run: str, key: str) -> list[Hit]:
        most = self._settings.searches_per_run
        if most is not None and self._provider.paid and await self._cache.add(f"run:{run}", 1) > most:
            message = f"the run {run!r} has used up its {most} searches (searches_per_run)"
            raise UpstreamError(Trouble.BUDGET, message)
        hits = await self._provider.search(query, count)
        if self._provider.paid:
            await self._cache.put(f"search:{key}", json.dumps([asdict(hit) for hit in hits]))
        return hits

    def _forget(self, key: str, task: asyncio.Task[list[Hit]]) -> None:
        self._under_way.pop(key, None)
        if not task.cancelled():
            task.exception()  # every waiter may be gone


def _hits_in(kept: str) -> list[Hit] | None:
    """Cached results; ``None`` when another version of this server wrote them."""
    try:
        return [Hit(**hit) for hit in json.loads(kept)]
    except (ValueError, TypeError):
        return None
