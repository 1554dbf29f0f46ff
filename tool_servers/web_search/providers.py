"""Search services: Serper and SearxNG."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import Field

from afm.trajectory.observation import readable
from tool_servers.shared.settings import ServerSettings
from tool_servers.shared.upstream import Trouble, Upstream, UpstreamError


class SearchSettings(ServerSettings):
    """The YAML of the web search server. The provider and its key come from the environment.

    Attributes:
        serper_url: Of Serper, or of any server with its protocol.
        page_url: For local pages without an address of their own: where they are, with ``{title}`` (blanks as
            underscores) or ``{id}`` in it.
        max_query_chars: Longer queries are refused.
        max_results: Most results of one search.
        searches_per_run: Most searches that one run may send to the provider; ``None`` is no bound.
        try_s: For one request to the provider.
        total_s: For all of them, when it is busy or fails.
        tries: Requests before a failure counts.
        cached_searches: Searches kept.
        cached_s: For how long.
    """

    content: ClassVar[str] = "web search settings"

    serper_url: str = "https://google.serper.dev"
    page_url: str | None = None
    max_query_chars: int = Field(default=2_000, ge=10)
    max_results: int = Field(default=50, ge=1)
    searches_per_run: int | None = Field(default=None, ge=1)
    try_s: float = Field(default=15.0, gt=0)
    total_s: float = Field(default=40.0, gt=0)
    tries: int = Field(default=4, ge=1)
    cached_searches: int = Field(default=100_000, ge=1)
    cached_s: float = Field(default=7 * 24 * 3600.0, gt=0)
    max_waiting: int = Field(default=1024, ge=0)


_MAX_TITLE_CHARS, _MAX_SNIPPET_CHARS, _MAX_LINK_CHARS = 300, 1_000, 2_000


@dataclass(frozen=True, slots=True)
class Hit:
    """One result of a search."""

    title: str
    link: str
    snippet: str


class Provider(Protocol):
    """Where results come from."""

    name: str
    """Part of the key under which searches are cached."""
    paid: bool
    """Whether a search counts against a run's budget."""

    async def search(self, query: str, count: int) -> list[Hit]:
        """At most ``count`` results, the best first; raises ``UpstreamError``."""
        ...

    async def close(self) -> None:
        """Let go of connections and files."""
        ...


class Serper:
    """Serper, or any server with its protocol (``POST /search`` with the key in ``X-API-KEY``)."""

    name = "serper"
    paid = True

    def __init__(self, service: Upstream) -> None:
        self._service = service

    async def search(self, query: str, count: int) -> list[Hit]:
        """At most ``count`` results.

        Raises:
            UpstreamError: The service gave none.
        """
        answer = await self._service.ask("POST", "/search", body={"q": query, "num": count})
        return _hits(_listed(answer, "organic", "Serper"), "snippet")[:count]

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()


class SearxNG:
    """A SearxNG server whose JSON format is switched on (``search.formats`` in its settings)."""

    name = "searxng"
    paid = True

    def __init__(self, service: Upstream) -> None:
        self._service = service

    async def search(self, query: str, count: int) -> list[Hit]:
        """At most ``count`` results.

        Raises:
            UpstreamError: The server gave none.
        """
        answer = await self._service.ask("GET", "/search", params={"q": query, "format": "json"})
        return _hits(_listed(answer, "results", "SearxNG"), "content")[:count]

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()


def _listed(answer: Any, field: str, name: str) -> list[Any]:
    found = answer.get(field, []) if isinstance(answer, dict) else None
    if not isinstance(found, list):
        raise UpstreamError(Trouble.BROKEN, f"the answer of {name} holds no list of results")
    return found


def _hits(rows: Iterable[Any], snippet: str) -> list[Hit]:
    """The rows that are results; others are passed over."""
    found = []
    for row in rows:
        if not isinstance(row, dict):
            continue
        link = row.get("link") or row.get("url")
        if (
            isinstance(link, str)
            and link.startswith(("http://", "https://"))
            and len(link) <= _MAX_LINK_CHARS
        ):
            title = _line(row.get("title"), _MAX_TITLE_CHARS)
            found.append(
                Hit(title or link, _line(link, _MAX_LINK_CHARS), _line(row.get(snippet), _MAX_SNIPPET_CHARS))
            )
    return found


def _line(text: object, max_chars: int) -> str:
    return " ".join(readable(text[: 2 * max_chars]).split())[:max_chars] if isinstance(text, str) else ""
