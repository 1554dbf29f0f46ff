"""The web search server: ``POST /search`` in the form of Serper.

``{"q": "...", "num": 10}`` returns ``{"organic": [{"title", "link", "snippet", "position"}]}``. A run that has used up
its budget gets status 402. For the rest, see :mod:`tool_servers.shared.endpoint`.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from afm.errors import DataError
from tool_servers.shared.cache import Cache, WorkUnderWay, open_web_cache
from tool_servers.shared.command import Launch, NotSetUpError
from tool_servers.shared.endpoint import Endpoint, closing, counter, gauge, json_body
from tool_servers.shared.serve import ServedApp
from tool_servers.shared.upstream import Trouble, UpstreamError
from tool_servers.web_search.providers import Hit, Provider, SearchSettings, check_local, open_provider

PATH = "/search"
_LATE_S = 5.0
_HITS = TypeAdapter(list[Hit])


class SearchRequest(BaseModel):
    """The body of ``POST /search``, in the form of Serper; unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    q: str = Field(min_length=1)
    """The query."""
    num: int | None = Field(default=None, ge=1)
    """Number of results; the server's default when absent."""
    run: str = Field(default="", max_length=200)
    """Run whose budget the search counts toward."""


class Searcher:
    """Answers searches; equal searches at the same time are sent to the provider once.

    Args:
        results: Default number of results.
    """

    def __init__(self, provider: Provider, cache: Cache, settings: SearchSettings, results: int) -> None:
        self._provider = provider
        self._cache = cache
        self._settings = settings
        self._results = results
        self._under_way: WorkUnderWay[tuple[list[Hit], bool]] = WorkUnderWay()
        self.searches = counter(
            "afm_search_searches",
            "Searches, by how they were answered.",
            "how",
            ("provider", "cache", *Trouble),
        )

    async def answer(self, request: SearchRequest) -> dict[str, Any]:
        """Return results in the form of Serper.

        Raises:
            DataError: The query is too long.
            UpstreamError: The provider did not answer, or the budget of the run is used up.
        """
        query = " ".join(request.q.split())
        if len(query) > self._settings.max_query_chars:
            most = self._settings.max_query_chars
            message = f"the query has {len(query)} characters, expected at most {most}"
            raise DataError(message)
        count = min(request.num or self._results, self._settings.max_results)
        try:
            hits, cached = await self._hits(query, count, request.run)
        except UpstreamError as error:
            self.searches.labels(error.trouble).inc()
            raise
        self.searches.labels("cache" if cached else "provider").inc()
        return {
            "searchParameters": {"q": query, "num": count, "engine": self._provider.name},
            "organic": [asdict(hit) | {"position": place} for place, hit in enumerate(hits, 1)],
            "cached": cached,
        }

    async def close(self) -> None:
        """Cancel running work and close everything."""
        await self._under_way.close()
        await self._provider.close()
        await self._cache.close()

    async def _hits(self, query: str, count: int, run: str) -> tuple[list[Hit], bool]:
        """Return the results, and whether they came from the cache or from a search that was already running."""
        about = f"{self._provider.name}\0{count}\0{query}".encode("utf-8", "replace")
        key = f"search:{hashlib.sha256(about).hexdigest()}"
        (hits, cached), shared = await self._under_way.result(
            key,
            lambda: self._cache.cached(
                key,
                _HITS,
                lambda: self._searched(query, count, run),
                worth=lambda _: self._provider.paid,
            ),
        )
        return hits, cached or shared

    async def _searched(self, query: str, count: int, run: str) -> list[Hit]:
        most = self._settings.searches_per_run
        if most is not None and self._provider.paid and await self._cache.add(f"run:{run}", 1) > most:
            message = f"the run {run!r} has used up its {most} searches (searches_per_run)"
            raise UpstreamError(Trouble.BUDGET, message)
        return await self._provider.search(query, count)


def check(launch: Launch) -> None:
    """Check the provider's key and address, or read all pages.

    Raises:
        ConfigError: A setting is missing or wrong.
        DataError: A row is not a page.
    """
    settings, environment = SearchSettings.read(launch.config), launch.environment
    if environment.web_search_method_type != "local":
        open_provider(settings, environment)
    elif environment.web_page_store is None:
        raise NotSetUpError("WEB_PAGE_STORE is not set; name a JSONL of pages, or choose serper or searxng")
    else:
        check_local(environment.web_page_store, settings.page_url)


def open_app(launch: Launch) -> ServedApp:
    """Open the application.

    Raises:
        ConfigError: The provider lacks its key, address or pages, or the cache cannot be opened.
    """
    settings, environment = SearchSettings.read(launch.config), launch.environment
    token = launch.address().token
    provider = open_provider(settings, environment)
    cache = open_web_cache(
        environment, "searches", max_entries=settings.cached_searches, ttl_s=settings.cached_s
    )
    searcher = Searcher(provider, cache, settings, environment.web_search_serp_num)
    errors = gauge("afm_search_cache_errors", "Cache operations that failed.", lambda: cache.errors)
    endpoint = Endpoint(
        "search",
        settings,
        token=token,
        work_s=settings.total_s + _LATE_S,
        metrics=(searcher.searches, errors),
    )
    search = endpoint.post(PATH, json_body(SearchRequest), searcher.answer)
    app = endpoint.app(search, life=closing(searcher.close))
    return ServedApp(app, token, settings.finish_s)


def trial(client: httpx.Client) -> str:
    """Run one search."""
    results = client.post(PATH, json={"q": "long river", "num": 3}).raise_for_status().json()["organic"]
    return f"{len(results)} results"
