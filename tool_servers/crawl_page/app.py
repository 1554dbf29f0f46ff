"""The page reader's HTTP interface: ``POST /crawl_page``; the rest as in :mod:`tool_servers.shared.endpoint`.

``{"urls": "https://a.org | https://b.org", "goal": "...", "seconds": 60}`` gives ``{"pages": [..], "left_out": 0}``, each page
``{url, title, text, kind, by, cached}``; a page that could not be read has a ``kind`` and says why in ``text``. Clients of AFM, which send ``web_search_query`` or
``think_content``, are answered with ``success``, ``obs``, ``error_message`` and ``processing_time`` as well.
"""

from __future__ import annotations

from fastapi import FastAPI

from afm.settings import Environment
from tool_servers.crawl_page.digest import open_digester
from tool_servers.crawl_page.reading import CrawlRequest, PageReader
from tool_servers.crawl_page.settings import CrawlSettings
from tool_servers.crawl_page.sources import open_source
from tool_servers.shared.cache import open_cache
from tool_servers.shared.endpoint import Endpoint
from tool_servers.shared.metrics import Gauge
from tool_servers.shared.settings import cache_place

PATH = "/crawl_page"
_LATE_S = 5.0


def crawl_app(settings: CrawlSettings, environment: Environment, token: str | None) -> FastAPI:
    """The application.

    Raises:
        ConfigError: The environment lacks something, or the cache cannot be opened.
    """
    digester = open_digester(settings, environment)
    source = open_source(settings, environment)
    cache = open_cache(
        cache_place(environment), "pages", max_entries=settings.cached_pages, ttl_s=settings.cached_s
    )
    reader = PageReader(source, digester, cache, max_urls=settings.max_urls, request_s=settings.request_s)
    errors = Gauge("afm_crawl_cache_errors", "Cache operations that failed.", lambda: cache.errors)
    endpoint = Endpoint(
        "crawl",
        PATH,
        CrawlRequest,
        reader.answer,
        settings,
        work_s=settings.request_s + _LATE_S,
        token=token,
        metrics=(reader.pages, errors),
        close=reader.close,
    )
    return endpoint.app()
