"""The web search server's HTTP interface: ``POST /search`` as Serper has it; the rest as in the shared endpoint.

``{"q": "...", "num": 10}`` gives ``{"organic": [{"title", "link", "snippet", "position"}]}``. A run that has used up its budget
gets status 402.
"""

from __future__ import annotations

from fastapi import FastAPI

from afm.settings import Environment
from tool_servers.shared.cache import open_cache
from tool_servers.shared.endpoint import Endpoint
from tool_servers.shared.metrics import Gauge
from tool_servers.shared.settings import cache_place
from tool_servers.web_search.local import open_provider
from tool_servers.web_search.providers import SearchSettings
from tool_servers.web_search.searching import Searcher, SearchRequest

PATH = "/search"
_LATE_S = 5.0


def search_app(settings: SearchSettings, environment: Environment, token: str | None) -> FastAPI:
    """The application.

    Raises:
        ConfigError: The provider lacks its key, address or pages, or the cache cannot be opened.
    """
    provider = open_provider(settings, environment)
    cache = open_cache(
        cache_place(environment), "searches", max_entries=settings.cached_searches, ttl_s=settings.cached_s
    )
    searcher = Searcher(provider, cache, settings, environment.web_search_serp_num)
    errors = Gauge("afm_search_cache_errors", "Cache operations that failed.", lambda: cache.errors)
    endpoint = Endpoint(
        "search",
        PATH,
        SearchRequest,
        searcher.answer,
        settings,
        work_s=settings.total_s + _LATE_S,
        token=token,
        metrics=(searcher.searches, errors),
        close=searcher.close,
    )
    return endpoint.app()
