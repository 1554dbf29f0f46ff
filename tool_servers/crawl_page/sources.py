"""Where the text of a page comes from: fetched and read here, or by a reader service."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from afm.settings import Environment
from afm.trajectory.observation import readable
from tool_servers.crawl_page.digest import SummarySettings
from tool_servers.shared.fetch import Fetcher, FetchError, FetcherSettings, FetchFault, FetchLimits
from tool_servers.shared.parser_pool import ParseError, ParserPool
from tool_servers.shared.upstream import Patience, Trouble, Upstream, UpstreamError
from tool_servers.shared.url_guard import Policy, target_of

_PAGES_PER_PROCESS = 500
_READER_TOKENS = 80_000
_FAULTS = {
    Trouble.TIMEOUT: FetchFault.TIMEOUT,
    Trouble.TOO_LARGE: FetchFault.TOO_LARGE,
    Trouble.BROKEN: FetchFault.BROKEN,
}


class ReaderKind(StrEnum):
    """Who fetches pages: this server, or a reader service."""

    DIRECT = "direct"
    JINA = "jina"


class CrawlSettings(FetcherSettings):
    """The YAML of the page reader."""

    content: ClassVar[str] = "page reader settings"

    reader: ReaderKind = ReaderKind.DIRECT
    """Who fetches pages: ``direct``, this server, or ``jina``, the reader service at ``JINA_BASE_URL``."""
    max_urls: int = Field(default=8, ge=1)
    """Pages of one request; further addresses are refused."""
    max_page_chars: int = Field(default=300_000, ge=1000)
    """Of a page's text; its end is lost."""
    shown_chars: int = Field(default=6_000, ge=200)
    """Of a page that an agent is shown, when no model sums it up."""
    parse_s: float = Field(default=10.0, gt=0)
    """For turning one page into text."""
    cached_pages: int = Field(default=10_000, ge=1)
    """Pages kept."""
    summary: SummarySettings = SummarySettings()
    """How a model sums pages up."""


@dataclass(frozen=True, slots=True)
class PageText:
    """A page as text.

    Attributes:
        url: Where it was found.
        title: May be empty.
    """

    url: str
    title: str
    text: str


class DirectSource:
    """Fetches pages itself, behind the guard, and reads them in parser processes."""

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
        """The page at ``url``.

        Raises:
            FetchError: It cannot be fetched or read.
        """
        page = await self._fetcher.fetch(url)
        about = {"media_type": page.media_type, "charset": page.charset, "url": page.url}
        try:
            content, _ = await self._pool.parse(about | {"max_chars": self._max_chars}, page.body)
        except ParseError as error:
            raise FetchError(FetchFault.PARSE, str(error)) from None
        return PageText(page.url, content["title"], content["text"])

    async def close(self) -> None:
        """Close connections, end parsers."""
        await self._fetcher.close()
        await self._pool.close()


class ReaderSource:
    """Lets a reader service (r.jina.ai, or one of its kind) fetch and read pages.

    The guard judges the address before it is passed on; redirects are followed by the service, out of its sight.
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
        """The page at ``url``.

        Raises:
            FetchError: The address is blocked, or the service cannot read it.
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
            raise FetchError(FetchFault.BROKEN, "the reader's answer holds no page")
        text = readable(text[: self._max_chars]).strip()
        if not text:
            raise FetchError(FetchFault.PARSE, "the page holds no readable text")
        title, place = data.get("title"), data.get("url")
        return PageText(
            place if isinstance(place, str) and place else normal,
            " ".join(readable(title).split())[:200] if isinstance(title, str) else "",
            text,
        )

    async def close(self) -> None:
        """Close connections."""
        await self._reader.close()
        await self._fetcher.close()


PageSource = DirectSource | ReaderSource


def open_source(settings: CrawlSettings, environment: Environment) -> PageSource:
    """The source that the settings name."""
    policy = settings.policy()
    fetcher = Fetcher(policy, FetchLimits(max_bytes=settings.max_bytes, total_s=settings.fetch_s))
    if settings.reader is ReaderKind.DIRECT:
        return DirectSource(fetcher, settings)
    patience = Patience(
        tries=3, try_s=settings.fetch_s, total_s=2 * settings.fetch_s, max_bytes=settings.max_bytes
    )
    reader = Upstream(
        "the reader service", environment.jina_base_url, key=environment.jina_api_key, patience=patience
    )
    return ReaderSource(reader, fetcher, policy, settings.max_page_chars, settings.fetch_s)
