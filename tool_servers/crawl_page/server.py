"""The page reader: public web pages for agents, summarised for what they look for.

``POST /crawl_page`` with ``{"urls": "https://a.org | https://b.org", "goal": "...", "seconds": 60}`` returns
``{"pages": [..], "left_out": 0}``, each page as ``{url, title, text, kind, by, cached}``. A page that could not be
read has a ``kind`` and the reason in ``text``. Clients of AFM send ``web_search_query`` or ``think_content`` and also
get ``success``, ``obs``, ``error_message`` and ``processing_time``. For the rest, see
:mod:`tool_servers.shared.endpoint`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import httpx
from pydantic import BaseModel, Field, TypeAdapter

from afm.settings import Environment
from afm.tools.crawl_page import urls_in
from afm.trajectory.observation import readable
from tool_servers.crawl_page.digest import Digest, Digester, SummarySettings, open_digester
from tool_servers.shared.cache import Cache, WorkUnderWay, open_web_cache
from tool_servers.shared.command import Launch
from tool_servers.shared.endpoint import Endpoint, TimedRequest, closing, counter, gauge, json_body
from tool_servers.shared.fetch import Fetcher, FetchError, FetcherSettings, FetchFault, FetchLimits
from tool_servers.shared.parser_pool import ParseError, ParserPool
from tool_servers.shared.serve import ServedApp
from tool_servers.shared.upstream import Patience, Trouble, Upstream, UpstreamError
from tool_servers.shared.url_guard import Policy, target_of

PATH = "/crawl_page"
_PAGES_PER_PROCESS = 500
_READER_TOKENS = 80_000
_FAULTS = {
    Trouble.TIMEOUT: FetchFault.TIMEOUT,
    Trouble.TOO_LARGE: FetchFault.TOO_LARGE,
    Trouble.BROKEN: FetchFault.BROKEN,
}
_LATE_S = 5.0
_MARGIN_S = 2.0
"""Part of the client's time reserved for passages and the answer; one second is too little on a busy machine."""
_MOST_GOAL_CHARS = 8_000


class CrawlSettings(FetcherSettings):
    """The YAML of the page reader."""

    content: ClassVar[str] = "page reader settings"

    reader: Literal["direct", "jina"] = "direct"
    """Who fetches pages: this server (``direct``), or the reader service at ``JINA_BASE_URL`` (``jina``)."""
    max_urls: int = Field(default=8, ge=1)
    """Pages of one request. Further addresses are returned in ``left_out``."""
    max_page_chars: int = Field(default=300_000, ge=1000)
    """Longest text of a page. The rest is cut off."""
    shown_chars: int = Field(default=6_000, ge=200)
    """Characters of a page that an agent reads when no model summarises it."""
    parse_s: float = Field(default=10.0, gt=0)
    """Seconds to turn one page into text."""
    cached_pages: int = Field(default=10_000, ge=1)
    """Pages in the cache."""
    summary: SummarySettings = SummarySettings()
    """Settings of the model that summarises pages."""


@dataclass(frozen=True, slots=True)
class PageText:
    """A page as text.

    Attributes:
        url: Address after redirects.
        title: May be empty.
    """

    url: str
    title: str
    text: str


class DirectSource:
    """Fetches pages itself, guarded, and extracts their text in parser processes."""

    def __init__(self, fetcher: Fetcher, settings: CrawlSettings) -> None:
        self._fetcher = fetcher
        self._max_chars = settings.max_page_chars
        self._pool = ParserPool(
            "tool_servers.crawl_page.extract",
            "page",
            workers=settings.workers,
            file_s=settings.parse_s,
            files_per_process=_PAGES_PER_PROCESS,
            first=(
                {"media_type": "text/html", "charset": None, "url": "http://example.org/", "max_chars": 10},
                b"<p>hello</p>",
            ),
        )

    async def read(self, url: str) -> PageText:
        """Fetch the page at ``url``.

        Raises:
            FetchError: The page cannot be fetched or read.
        """
        page = await self._fetcher.fetch(url)
        about = {"media_type": page.media_type, "charset": page.charset, "url": page.url}
        try:
            content, _ = await self._pool.parse(about | {"max_chars": self._max_chars}, page.body)
        except ParseError as error:
            raise FetchError(FetchFault.PARSE, str(error)) from None
        return PageText(page.url, content["title"], content["text"])

    async def close(self) -> None:
        """Close connections and kill the parsers."""
        await self._fetcher.close()
        await self._pool.close()


class ReaderSource:
    """Has a reader service, such as r.jina.ai, fetch and read pages.

    The guard checks the address before the service gets it. The service follows redirects without the guard.
    """

    def __init__(
        self, reader: Upstream, fetcher: Fetcher, policy: Policy, max_chars: int, page_s: float
    ) -> None:
        self._reader = reader
        self._fetcher = fetcher
        self._policy = policy
        self._max_chars = max_chars
        self._headers = {
            "Accept": "application/json",
            "X-Token-Budget": str(_READER_TOKENS),
            "X-Timeout": str(max(1, round(page_s))),
        }

    async def read(self, url: str) -> PageText:
        """Have the service fetch the page at ``url``.

        Raises:
            FetchError: The address is blocked, or the service cannot read the page.
        """
        await self._fetcher.check(url)
        normal = target_of(url, self._policy).url
        try:
            answer = await self._reader.ask("GET", f"/{normal}", headers=self._headers)
        except UpstreamError as error:
            raise FetchError(_FAULTS.get(error.trouble, FetchFault.STATUS), str(error)) from None
        data = answer.get("data") if isinstance(answer, dict) else None
        text = data.get("content") if isinstance(data, dict) else None
        if not isinstance(text, str) or not isinstance(data, dict):
            raise FetchError(FetchFault.BROKEN, "the answer of the reader service has no page")
        text = readable(text[: self._max_chars]).strip()
        if not text:
            raise FetchError(FetchFault.PARSE, "the page holds no readable text")
        title, place = data.get("title"), data.get("url")
        return PageText(
            readable(place) if isinstance(place, str) and place else normal,
            " ".join(readable(title).split())[:200] if isinstance(title, str) else "",
            text,
        )

    async def close(self) -> None:
        """Close connections."""
        await self._reader.close()
        await self._fetcher.close()


PageSource = DirectSource | ReaderSource


def open_source(settings: CrawlSettings, environment: Environment) -> PageSource:
    """Open the source that the settings name."""
    policy = settings.policy()
    fetcher = Fetcher(policy, FetchLimits(max_bytes=settings.max_bytes, total_s=settings.fetch_s))
    if settings.reader == "direct":
        return DirectSource(fetcher, settings)
    patience = Patience(
        tries=3, try_s=settings.fetch_s, total_s=2 * settings.fetch_s, max_bytes=settings.max_bytes
    )
    reader = Upstream(
        "the reader service", environment.jina_base_url, key=environment.jina_api_key, patience=patience
    )
    return ReaderSource(reader, fetcher, policy, settings.max_page_chars, settings.fetch_s)


_PAGE, _DIGEST = TypeAdapter(PageText), TypeAdapter(Digest)


class CrawlRequest(TimedRequest):
    """The body of ``POST /crawl_page``."""

    urls: str | list[str] = Field(max_length=100_000)
    """Addresses: a list, or a text as agents write it, separated by ``|`` or as Markdown links."""
    goal: str = Field(default="", max_length=_MOST_GOAL_CHARS)
    """What the agent looks for; may be empty."""
    task: str | None = Field(default=None, max_length=_MOST_GOAL_CHARS)
    """The question. AFM's clients send this field and the next two, and also get an answer in AFM's form."""
    web_search_query: str | None = Field(default=None, max_length=_MOST_GOAL_CHARS)
    """What the agent searched for last."""
    think_content: str | None = Field(default=None, max_length=_MOST_GOAL_CHARS)
    """The last thought of the agent."""

    @property
    def published(self) -> bool:
        """Whether the client is one of AFM's."""
        return self.web_search_query is not None or self.think_content is not None

    def aim(self) -> str:
        """Return what the agent looks for, from all fields that may contain it."""
        texts = (self.goal, self.task, self.web_search_query, self.think_content)
        return "\n".join(text for text in texts if text)[:_MOST_GOAL_CHARS]


class PageShown(BaseModel):
    """One page of an answer."""

    url: str
    title: str = ""
    text: str
    """The digest, or the reason why it is missing."""
    kind: FetchFault | None = None
    """Why there is no digest; otherwise ``None``."""
    by: str = ""
    """How the digest was made; see :class:`Digest`."""
    cached: bool = False
    """Whether the page came from the cache."""


class PageReader:
    """Reads pages; reads an address once that several requests want at the same time.

    Args:
        max_urls: Most pages of one request.
        request_s: Longest time for a request, in seconds; also the default if the client names none.
    """

    def __init__(
        self, source: PageSource, digester: Digester, cache: Cache, *, max_urls: int, request_s: float
    ) -> None:
        self._source = source
        self._digester = digester
        self._cache = cache
        self._max_urls = max_urls
        self._request_s = request_s
        self._under_way: WorkUnderWay[tuple[PageText, bool]] = WorkUnderWay()
        self.pages = counter(
            "afm_crawl_pages", "Pages asked for, by how they ended.", "end", ("read", "cached", *FetchFault)
        )

    async def answer(self, request: CrawlRequest) -> dict[str, Any]:
        """Return the pages in the order of the request."""
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
        """Cancel running work and close everything."""
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
        return PageShown(url=page.url, title=page.title, text=digest.text, by=digest.by, cached=cached)

    async def _page(self, url: str) -> tuple[PageText, bool]:
        key = f"page:{_digest_of(url)}"
        work = partial(self._cache.cached, key, _PAGE, lambda: self._source.read(url))
        return (await self._under_way.result(key, work))[0]

    async def _digest(self, page: PageText, goal: str, until: float) -> Digest:
        key = f"digest:{_digest_of(page.url, page.text, goal, self._digester.name)}"
        digest, _ = await self._cache.cached(
            key,
            _DIGEST,
            lambda: self._digester.digest(page.text, goal, max(0.0, until - time.monotonic())),
            worth=lambda made: made.by == "model",  # finding passages again is faster than storing them
        )
        return digest


def _as_published(shown: Sequence[PageShown], request: CrawlRequest) -> dict[str, Any]:
    """Return the fields of AFM's answer; a request fails if none of its pages could be read."""
    success = any(page.kind is None for page in shown)
    text = "\n\n".join(f"{page.title}\n{page.url}\n{page.text}".strip() for page in shown)
    return {
        "success": success,
        "obs": text,
        "error_message": None if success else text or "the request holds no address",
        "processing_time": round(request.waited_s(), 3),
    }


def _digest_of(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()


def check(launch: Launch) -> None:
    """Check the settings of the summary model.

    Raises:
        ConfigError: They are wrong.
    """
    settings = CrawlSettings.read(launch.config)
    open_digester(settings.summary, settings.shown_chars, launch.environment)


def open_app(launch: Launch) -> ServedApp:
    """Open the application.

    Raises:
        ConfigError: A setting is missing or wrong, or the cache cannot be opened.
    """
    settings, environment = CrawlSettings.read(launch.config), launch.environment
    token = launch.address().token
    digester = open_digester(settings.summary, settings.shown_chars, environment)
    source = open_source(settings, environment)
    cache = open_web_cache(environment, "pages", max_entries=settings.cached_pages, ttl_s=settings.cached_s)
    reader = PageReader(source, digester, cache, max_urls=settings.max_urls, request_s=settings.request_s)
    errors = gauge("afm_crawl_cache_errors", "Cache operations that failed.", lambda: cache.errors)
    endpoint = Endpoint(
        "crawl", settings, token=token, work_s=settings.request_s + _LATE_S, metrics=(reader.pages, errors)
    )
    crawl = endpoint.post(PATH, json_body(CrawlRequest), reader.answer)
    app = endpoint.app(crawl, life=closing(reader.close))
    return ServedApp(app, token, settings.finish_s)


def trial(client: httpx.Client) -> str:
    """Request a private address, which must be refused; so nothing is fetched."""
    body = {"urls": "http://127.0.0.1:9/", "goal": "", "seconds": 30}
    kind = client.post(PATH, json=body).raise_for_status().json()["pages"][0]["kind"]
    if kind != "blocked":
        raise ValueError(f"a private address is {kind!r}, expected 'blocked'")
    return "a private address is blocked"
