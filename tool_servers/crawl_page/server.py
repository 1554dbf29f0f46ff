"""The page reader: public web pages for agents, summed up toward what they look for.

``POST /crawl_page`` with ``{"urls": "https://a.org | https://b.org", "goal": "...", "seconds": 60}`` gives
``{"pages": [..], "left_out": 0}``, each page ``{url, title, text, kind, by, cached}``; a page that could not be read has a ``kind`` and
says why in ``text``. Clients of AFM, which send ``web_search_query`` or ``think_content``, are answered with ``success``, ``obs``,
``error_message`` and ``processing_time`` as well. The rest as in :mod:`tool_servers.shared.endpoint`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import httpx
from pydantic import BaseModel, Field
from starlette.applications import Starlette

from afm.settings import Environment
from afm.tools.crawl_page import urls_in
from tool_servers.crawl_page.digest import Digester, open_digester
from tool_servers.crawl_page.sources import CrawlSettings, PageSource, PageText, open_source
from tool_servers.shared.cache import Cache, WorkUnderWay, open_web_cache
from tool_servers.shared.command import Launch
from tool_servers.shared.endpoint import Endpoint, TimedRequest, closing, counter, gauge, json_body
from tool_servers.shared.fetch import FetchError, FetchFault
from tool_servers.shared.serve import ServedApp

PATH = "/crawl_page"
_LATE_S = 5.0
_MARGIN_S = 2.0
"""Of the caller's time, kept for passages without the model and for the way back; a busy machine needs more than one second."""
_MOST_GOAL_CHARS = 8_000


class CrawlRequest(TimedRequest):
    """The body of ``POST /crawl_page``."""

    urls: str | list[str] = Field(max_length=100_000)
    """Addresses: a list, or as an agent writes them, separated by ``|`` or as markdown links."""
    goal: str = Field(default="", max_length=_MOST_GOAL_CHARS)
    """What the agent looks for; may be empty."""
    task: str | None = Field(default=None, max_length=_MOST_GOAL_CHARS)
    """The question. This field and the next two are those of AFM's clients, which get an answer in AFM's
    form, too."""
    web_search_query: str | None = Field(default=None, max_length=_MOST_GOAL_CHARS)
    """What the agent searched for last."""
    think_content: str | None = Field(default=None, max_length=_MOST_GOAL_CHARS)
    """Its last thought."""

    @property
    def published(self) -> bool:
        """Whether a client of AFM asks."""
        return self.web_search_query is not None or self.think_content is not None

    def aim(self) -> str:
        """What the agent looks for, in whichever fields it stands."""
        texts = (self.goal, self.task, self.web_search_query, self.think_content)
        return "\n".join(text for text in texts if text)[:_MOST_GOAL_CHARS]


class PageShown(BaseModel):
    """One page of an answer."""

    url: str
    title: str = ""
    text: str
    """The digest, or the failure in words."""
    kind: FetchFault | None = None
    """Why there is no text, a :class:`FetchFault`; ``None`` when there is."""
    by: str = ""
    """How the digest was made."""
    cached: bool = False
    """Whether the page came from the cache."""


class PageReader:
    """Reads pages; equal addresses at the same time are read once.

    Args:
        max_urls: Of one request.
        request_s: For a request whose sender does not say how long it waits; no request takes longer.
    """

    def __init__(
        self, source: PageSource, digester: Digester, cache: Cache, *, max_urls: int, request_s: float
    ) -> None:
        self._source = source
        self._digester = digester
        self._cache = cache
        self._max_urls = max_urls
        self._request_s = request_s
        self._under_way: WorkUnderWay[PageText] = WorkUnderWay()
        self.pages = counter(
            "afm_crawl_pages", "Pages asked for, by how they ended.", "end", ("read", "cached", *FetchFault)
        )

    async def answer(self, request: CrawlRequest) -> dict[str, Any]:
        """The pages in the order asked for."""
        until = request.until(self._request_s)
        listed = request.urls if isinstance(request.urls, str) else "\n".join(request.urls)
        urls = urls_in(listed)
        shown = await asyncio.gather(
            *(self._shown(url, request.aim(), until) for url in urls[: self._max_urls])
        )
        left_out = len(urls) - len(shown)
        answer = {"pages": [page.model_dump(mode="json") for page in shown], "left_out": max(0, left_out)}
        return answer | _as_published(shown, request) if request.published else answer

    async def close(self) -> None:
        """End what is under way, close everything."""
        await self._under_way.close()
        for part in (self._source, self._digester, self._cache):
            await part.close()

    async def _shown(self, url: str, goal: str, until: float) -> PageShown:
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic() - _MARGIN_S / 2)):
                page, cached = await self._page(url)
                digest = await self._digest(page, goal, until - _MARGIN_S)
        except FetchError as error:
            self.pages.labels(error.fault).inc()
            return PageShown(url=url, text=str(error), kind=error.fault)
        except TimeoutError:
            self.pages.labels(FetchFault.TIMEOUT).inc()
            return PageShown(url=url, text="reading the page took too long", kind=FetchFault.TIMEOUT)
        self.pages.labels("cached" if cached else "read").inc()
        return PageShown(url=page.url, title=page.title, text=digest[0], by=digest[1], cached=cached)

    async def _page(self, url: str) -> tuple[PageText, bool]:
        key = f"page:{_digest_of(url)}"
        kept = await self._cache.get(key)
        if kept is not None and (page := _page_in(kept)) is not None:
            return page, True
        page, _ = await self._under_way.result(key, lambda: self._fetched(url, key))
        return page, False

    async def _fetched(self, url: str, key: str) -> PageText:
        page = await self._source.read(url)
        await self._cache.put(key, json.dumps(asdict(page)))
        return page

    async def _digest(self, page: PageText, goal: str, until: float) -> tuple[str, str]:
        key = f"digest:{_digest_of(page.url, page.text, goal, self._digester.name)}"
        kept = await self._cache.get(key)
        if kept is not None:
            text, by = json.loads(kept)
            return text, by
        digest = await self._digester.digest(page.text, goal, max(0.0, until - time.monotonic()))
        if digest.by == "model":  # passages are found again faster than they are stored
            await self._cache.put(key, json.dumps([digest.text, digest.by]))
        return digest.text, digest.by


def _as_published(shown: Sequence[PageShown], request: CrawlRequest) -> dict[str, Any]:
    """The fields of AFM's answer; a request fails when none of its pages could be read."""
    success = any(page.kind is None for page in shown)
    text = "\n\n".join(f"{page.title}\n{page.url}\n{page.text}".strip() for page in shown)
    return {
        "success": success,
        "obs": text,
        "error_message": None if success else text or "the request holds no address",
        "processing_time": round(request.waited_s(), 3),
    }


def _page_in(kept: str) -> PageText | None:
    """A cached page; ``None`` when another version of this server wrote it."""
    try:
        return PageText(**json.loads(kept))
    except (ValueError, TypeError):
        return None


def _digest_of(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()


def crawl_app(settings: CrawlSettings, environment: Environment, token: str | None) -> Starlette:
    """The application.

    Raises:
        ConfigError: The environment lacks something, or the cache cannot be opened.
    """
    digester = open_digester(settings.summary, settings.shown_chars, environment)
    source = open_source(settings, environment)
    cache = open_web_cache(environment, "pages", max_entries=settings.cached_pages, ttl_s=settings.cached_s)
    reader = PageReader(source, digester, cache, max_urls=settings.max_urls, request_s=settings.request_s)
    errors = gauge("afm_crawl_cache_errors", "Cache operations that failed.", lambda: cache.errors)
    endpoint = Endpoint(
        "crawl", settings, token=token, work_s=settings.request_s + _LATE_S, metrics=(reader.pages, errors)
    )
    crawl = endpoint.post(PATH, json_body(CrawlRequest), reader.answer)
    return endpoint.app(crawl, life=closing(reader.close))


def check(launch: Launch) -> None:
    """Look for the summary model.

    Raises:
        ConfigError: Its settings are wrong.
    """
    settings = CrawlSettings.read(launch.config)
    open_digester(settings.summary, settings.shown_chars, launch.environment)


def open_app(launch: Launch) -> ServedApp:
    """The application."""
    settings, token = CrawlSettings.read(launch.config), launch.address().token
    return ServedApp(crawl_app(settings, launch.environment, token), token, settings.finish_s)


def trial(client: httpx.Client) -> str:
    """Ask for a private address, which must be refused: so nothing is fetched."""
    body = {"urls": "http://127.0.0.1:9/", "goal": "", "seconds": 30}
    kind = client.post(PATH, json=body).raise_for_status().json()["pages"][0]["kind"]
    if kind != "blocked":
        raise ValueError(f"a private address is {kind!r}, expected 'blocked'")
    return "a private address is blocked"
