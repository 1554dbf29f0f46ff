"""Where the text of a page comes from: fetched and read here, or by a reader service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from afm.settings import Environment
from afm.trajectory.observation import readable
from tool_servers.crawl_page.extract_pool import ExtractPool
from tool_servers.crawl_page.settings import CrawlSettings, Reader
from tool_servers.shared.fetch import Fault, Fetcher, FetchError, FetchLimits
from tool_servers.shared.guard import Policy, target_of
from tool_servers.shared.upstream import Patience, Trouble, Upstream, UpstreamError

_READER_TOKENS = 80_000
_FAULTS = {Trouble.TIMEOUT: Fault.TIMEOUT, Trouble.TOO_LARGE: Fault.TOO_LARGE, Trouble.BROKEN: Fault.BROKEN}


@dataclass(frozen=True, slots=True)
class Page:
    """A page as text.

    Attributes:
        url: Where it was found.
        title: May be empty.
    """

    url: str
    title: str
    text: str


class Source(Protocol):
    """Reads pages."""

    async def read(self, url: str) -> Page:
        """The page; raises ``FetchError``."""
        ...

    async def close(self) -> None:
        """Let go of connections and processes."""
        ...


class DirectSource:
    """Fetches pages itself, behind the guard, and reads them in worker processes."""

    def __init__(self, fetcher: Fetcher, pool: ExtractPool) -> None:
        self._fetcher = fetcher
        self._pool = pool

    async def read(self, url: str) -> Page:
        """The page at ``url``.

        Raises:
            FetchError: It cannot be fetched or read.
        """
        fetched = await self._fetcher.fetch(url)
        found = await self._pool.extract(fetched)
        return Page(fetched.url, found.title, found.text)

    async def close(self) -> None:
        """Close connections, end workers."""
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

    async def read(self, url: str) -> Page:
        """The page at ``url``.

        Raises:
            FetchError: The address is blocked, or the service cannot read it.
        """
        await self._fetcher.check(url)
        normal = target_of(url, self._policy).url
        try:
            answer = await self._reader.ask("GET", f"/{normal}", headers=self._headers)
        except UpstreamError as error:
            raise FetchError(_FAULTS.get(error.trouble, Fault.STATUS), str(error)) from None
        data = answer.get("data") if isinstance(answer, dict) else None
        text = data.get("content") if isinstance(data, dict) else None
        if not isinstance(text, str) or not isinstance(data, dict):
            raise FetchError(Fault.BROKEN, "the reader's answer holds no page")
        text = readable(text[: self._max_chars]).strip()
        if not text:
            raise FetchError(Fault.PARSE, "the page holds no readable text")
        title, found = data.get("title"), data.get("url")
        return Page(
            found if isinstance(found, str) and found else normal,
            " ".join(readable(title).split())[:200] if isinstance(title, str) else "",
            text,
        )

    async def close(self) -> None:
        """Close connections."""
        await self._reader.close()
        await self._fetcher.close()


def open_source(settings: CrawlSettings, environment: Environment) -> Source:
    """The source that the settings name."""
    policy = Policy(frozenset(settings.ports), frozenset(settings.trusted))
    fetcher = Fetcher(policy, FetchLimits(max_bytes=settings.max_bytes, total_s=settings.fetch_s))
    if settings.reader is Reader.DIRECT:
        pool = ExtractPool(settings.worker_count(), settings.parse_s, settings.max_page_chars)
        return DirectSource(fetcher, pool)
    patience = Patience(
        tries=3, try_s=settings.fetch_s, total_s=2 * settings.fetch_s, max_bytes=settings.max_bytes
    )
    reader = Upstream(
        "the reader service", environment.jina_base_url, key=environment.jina_api_key, patience=patience
    )
    return ReaderSource(reader, fetcher, policy, settings.max_page_chars, settings.fetch_s)
