"""Search services: Serper and SearxNG."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from afm.errors import ConfigError
from afm.settings import Environment
from afm.trajectory.observation import readable
from tool_servers.shared.upstream import Patience, Trouble, Upstream, UpstreamError
from tool_servers.web_search.settings import SearchSettings

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


def open_provider(settings: SearchSettings, environment: Environment) -> Provider:
    """The provider that ``WEB_SEARCH_METHOD_TYPE`` names.

    Raises:
        ConfigError: Its key, address or pages are missing.
    """
    patience = Patience(settings.tries, settings.try_s, settings.total_s, 4 << 20)
    match environment.web_search_method_type:
        case "serper":
            key = environment.web_search_serper_api_key
            if key is None:
                raise ConfigError(
                    "WEB_SEARCH_METHOD_TYPE is serper, but WEB_SEARCH_SERPER_API_KEY is not set"
                )
            service = Upstream(
                "Serper",
                settings.serper_url,
                key=key,
                key_header="X-API-KEY",
                key_prefix="",
                patience=patience,
            )
            return Serper(service)
        case "searxng":
            if environment.searxng_base_url is None:
                raise ConfigError("WEB_SEARCH_METHOD_TYPE is searxng, but SEARXNG_BASE_URL is not set")
            return SearxNG(Upstream("SearxNG", environment.searxng_base_url, patience=patience))
        case "local":
            from tool_servers.web_search.local import open_local

            return open_local(environment.web_page_store, settings.page_url)


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
