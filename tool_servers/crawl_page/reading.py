"""Reading pages for an agent: cache, source, digest, and every failure in words."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from afm.tools.crawl_page import urls_in
from tool_servers.crawl_page.digest import Digester
from tool_servers.crawl_page.sources import Page, Source
from tool_servers.shared.cache import Cache
from tool_servers.shared.fetch import Fault, FetchError
from tool_servers.shared.metrics import Count

_MARGIN_S = 2.0
"""Of the caller's time, kept for passages without the model and for the way back; a busy machine needs more than one second."""
_MOST_GOAL_CHARS = 8_000


class CrawlRequest(BaseModel):
    """The body of ``POST /crawl_page``.

    Attributes:
        urls: Addresses: a list, or as an agent writes them, separated by ``|`` or as markdown links.
        goal: What the agent looks for; may be empty.
        seconds: How long the sender waits, a place in the queue included.
        task: The question. This field and the next two are those of AFM's clients, which get an answer in AFM's form, too.
        web_search_query: What the agent searched for last.
        think_content: Its last thought.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    urls: str | list[str] = Field(max_length=100_000)
    goal: str = Field(default="", max_length=_MOST_GOAL_CHARS)
    seconds: float | None = Field(default=None, gt=0)
    task: str | None = Field(default=None, max_length=_MOST_GOAL_CHARS)
    web_search_query: str | None = Field(default=None, max_length=_MOST_GOAL_CHARS)
    think_content: str | None = Field(default=None, max_length=_MOST_GOAL_CHARS)
    _arrived: float = PrivateAttr(default_factory=time.monotonic)

    def until(self, longest_s: float) -> float:
        """When the answer must be on its way, on the monotonic clock."""
        return self._arrived + min(self.seconds or longest_s, longest_s)

    @property
    def published(self) -> bool:
        """Whether a client of AFM asks."""
        return self.web_search_query is not None or self.think_content is not None

    def aim(self) -> str:
        """What the agent looks for, in whichever fields it stands."""
        told = (self.goal, self.task, self.web_search_query, self.think_content)
        return "\n".join(text for text in told if text)[:_MOST_GOAL_CHARS]

    @property
    def waited_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self._arrived


class PageShown(BaseModel):
    """One page of an answer.

    Attributes:
        kind: Why there is no text, a :class:`Fault`; ``None`` when there is.
        text: The digest, or the failure in words.
        by: How the digest was made.
        cached: Whether the page came from the cache.
    """

    url: str
    title: str = ""
    text: str
    kind: Fault | None = None
    by: str = ""
    cached: bool = False


class PageReader:
    """Reads pages; equal addresses at the same time are read once.

    Args:
        max_urls: Of one request.
        request_s: For a request whose sender does not say how long it waits; no request takes longer.
    """

    def __init__(
        self, source: Source, digester: Digester, cache: Cache, *, max_urls: int, request_s: float
    ) -> None:
        self._source = source
        self._digester = digester
        self._cache = cache
        self._max_urls = max_urls
        self._request_s = request_s
        self._under_way: dict[str, asyncio.Task[Page]] = {}
        self.pages = Count(
            "afm_crawl_pages_total", "Pages asked for, by how they ended.", "end", ("read", "cached", *Fault)
        )

    async def answer(self, asked: CrawlRequest) -> dict[str, Any]:
        """The pages in the order asked for."""
        until = asked.until(self._request_s)
        listed = asked.urls if isinstance(asked.urls, str) else "\n".join(asked.urls)
        urls = urls_in(listed)
        shown = await asyncio.gather(
            *(self._shown(url, asked.aim(), until) for url in urls[: self._max_urls])
        )
        left_out = len(urls) - len(shown)
        answer = {"pages": [page.model_dump(mode="json") for page in shown], "left_out": max(0, left_out)}
        return answer | _as_published(shown, asked) if asked.published else answer

    async def close(self) -> None:
        """End what is under way, close everything."""
        tasks = tuple(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for part in (self._source, self._digester, self._cache):
            await part.close()

    async def _shown(self, url: str, goal: str, until: float) -> PageShown:
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic() - _MARGIN_S / 2)):
                page, cached = await self._page(url)
                digest = await self._digest(page, goal, until - _MARGIN_S)
        except FetchError as error:
            self.pages.add(error.fault)
            return PageShown(url=url, text=str(error), kind=error.fault)
        except TimeoutError:
            self.pages.add(Fault.TIMEOUT)
            return PageShown(url=url, text="reading the page took too long", kind=Fault.TIMEOUT)
        self.pages.add("cached" if cached else "read")
        return PageShown(url=page.url, title=page.title, text=digest[0], by=digest[1], cached=cached)

    async def _page(self, url: str) -> tuple[Page, bool]:
        key = f"page:{_digest_of(url)}"
        kept = await self._cache.get(key)
        if kept is not None and (page := _page_in(kept)) is not None:
            return page, True
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._fetched(url, key))
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        # A waiter that is cancelled takes nothing from the others; the page still gets into the cache.
        return await asyncio.shield(task), False

    async def _fetched(self, url: str, key: str) -> Page:
        page = await self._source.read(url)
        await self._cache.put(key, json.dumps(asdict(page)))
        return page

    async def _digest(self, page: Page, goal: str, until: float) -> tuple[str, str]:
        key = f"digest:{_digest_of(page.url, page.text, goal, self._digester.name)}"
        kept = await self._cache.get(key)
        if kept is not None:
            text, by = json.loads(kept)
            return text, by
        digest = await self._digester.digest(page.text, goal, max(0.0, until - time.monotonic()))
        if digest.by == "model":  # passages are found again faster than they are stored
            await self._cache.put(key, json.dumps([digest.text, digest.by]))
        return digest.text, digest.by

    def _forget(self, key: str, task: asyncio.Task[Page]) -> None:
        self._under_way.pop(key, None)
        if not task.cancelled():
            task.exception()  # every waiter may be gone


def _as_published(shown: Sequence[PageShown], asked: CrawlRequest) -> dict[str, Any]:
    """The fields of AFM's answer; a request fails when none of its pages could be read."""
    success = any(page.kind is None for page in shown)
    text = "\n\n".join(f"{page.title}\n{page.url}\n{page.text}".strip() for page in shown)
    return {
        "success": success,
        "obs": text,
        "error_message": None if success else text or "the request holds no address",
        "processing_time": round(asked.waited_s, 3),
    }


def _page_in(kept: str) -> Page | None:
    """A cached page; ``None`` when another version of this server wrote it."""
    try:
        return Page(**json.loads(kept))
    except (ValueError, TypeError):
        return None


def _digest_of(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()
