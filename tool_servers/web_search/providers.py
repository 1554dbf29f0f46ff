"""Sources of search results: Serper, SearxNG, or local pages (a JSONL file, or an index built for wiki search)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import quote

from pydantic import Field

from afm.errors import ConfigError, DataError
from afm.settings import Environment
from afm.trajectory.observation import readable
from tool_servers.crawl_page.digest import best_passages
from tool_servers.shared.command import ServerSettings
from tool_servers.shared.upstream import Patience, Trouble, Upstream, UpstreamError
from tool_servers.wiki_search.corpus import terms_of
from tool_servers.wiki_search.index import checked_manifest
from tool_servers.wiki_search.search import Index, open_index

_MAX_TITLE_CHARS, _MAX_SNIPPET_CHARS, _MAX_LINK_CHARS = 300, 1_000, 2_000
_SNIPPET_CHARS = 300
_TITLE_WEIGHT = 3


class SearchSettings(ServerSettings):
    """The YAML of the web search server. The provider and its key come from the environment."""

    content: ClassVar[str] = "web search settings"

    serper_url: str = "https://google.serper.dev"
    """Address of Serper, or of any server with its protocol."""
    page_url: str | None = None
    """Address of local pages whose rows name no address, with ``{title}`` (blanks as
    underscores) or ``{id}`` in it."""
    max_query_chars: int = Field(default=2_000, ge=10)
    """Longest query. Longer ones are rejected."""
    max_results: int = Field(default=50, ge=1)
    """Largest number of results of one search."""
    searches_per_run: int | None = Field(default=None, ge=1)
    """Searches that one run may send to the provider. ``null``: no limit."""
    try_s: float = Field(default=15.0, gt=0)
    """Seconds for one request to the provider."""
    total_s: float = Field(default=40.0, gt=0)
    """Seconds for one search, including retries."""
    tries: int = Field(default=4, ge=1)
    """Requests to the provider before the search fails."""
    cached_searches: int = Field(default=100_000, ge=1)
    """Searches in the cache."""
    cached_s: float = Field(default=7 * 24 * 3600.0, gt=0)
    """Seconds that a search stays in the cache."""
    max_waiting: int = Field(default=1024, ge=0)


@dataclass(frozen=True, slots=True)
class Hit:
    """One result of a search."""

    title: str
    link: str
    snippet: str


class SearchService:
    """A search service over HTTP.

    Serper (``POST /search``, with the key in ``X-API-KEY``), any server with its protocol, or SearxNG with the JSON format
    enabled (``search.formats`` in its settings).
    """

    paid = True

    def __init__(self, name: Literal["serper", "searxng"], service: Upstream) -> None:
        self.name: str = name
        self._service = service

    async def search(self, query: str, count: int) -> list[Hit]:
        """Return at most ``count`` results.

        Raises:
            UpstreamError: The service did not answer.
        """
        if self.name == "serper":
            answer = await self._service.ask("POST", "/search", body={"q": query, "num": count})
            return _hits(_listed(answer, "organic", self._service.name), "snippet")[:count]
        answer = await self._service.ask("GET", "/search", params={"q": query, "format": "json"})
        return _hits(_listed(answer, "results", self._service.name), "content")[:count]

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()


def _listed(answer: Any, field: str, name: str) -> list[Any]:
    rows = answer.get(field, []) if isinstance(answer, dict) else None
    if not isinstance(rows, list):
        raise UpstreamError(Trouble.BROKEN, f"the answer of {name} has no list of results")
    return rows


def _hits(rows: Iterable[Any], snippet: str) -> list[Hit]:
    """Return the rows that are valid results; ignore the others."""
    hits = []
    for row in rows:
        if not isinstance(row, dict):
            continue
        link = row.get("link") or row.get("url")
        if (
            isinstance(link, str)
            and link.startswith(("http://", "https://"))
            and len(link) <= _MAX_LINK_CHARS
        ):
            link = _line(link, _MAX_LINK_CHARS)
            title = _line(row.get("title"), _MAX_TITLE_CHARS) or link
            hits.append(Hit(title, link, _line(row.get(snippet), _MAX_SNIPPET_CHARS)))
    return hits


def _line(text: object, max_chars: int) -> str:
    return " ".join(readable(text[: 2 * max_chars]).split())[:max_chars] if isinstance(text, str) else ""


class LocalPages:
    """Local pages, searched in a thread of this process."""

    name = "local"
    paid = False

    async def search(self, query: str, count: int) -> list[Hit]:
        """Return the best ``count`` pages."""
        return await asyncio.to_thread(self._search, query, count)

    async def close(self) -> None:
        """Do nothing; there is nothing to close."""

    def _search(self, query: str, count: int) -> list[Hit]:
        raise NotImplementedError


class PageFile(LocalPages):
    """BM25 over a JSONL file of ``{url, title, text}``. The pages stay in the file; terms and offsets are in memory.

    Args:
        page_url: Address for rows without one; see ``SearchSettings.page_url``.

    Raises:
        DataError: A row is not a page; names file and line.
    """

    def __init__(self, path: Path, page_url: str | None) -> None:
        import bm25s

        self._path = path
        self._page_url = page_url
        self._places: list[int] = []
        corpus = []
        for place, row in _rows(path, page_url):
            self._places.append(place)
            corpus.append(terms_of(row["title"]) * _TITLE_WEIGHT + terms_of(row["text"]) or ["-"])
        if not corpus:
            raise _no_page(path)
        self._words = set().union(*map(set, corpus))
        self._index = bm25s.BM25()
        self._index.index(corpus, show_progress=False)

    def _search(self, query: str, count: int) -> list[Hit]:
        import numpy as np

        words = [word for word in dict.fromkeys(terms_of(query)) if word in self._words]
        if not words:
            return []
        scores = self._index.get_scores(words)
        order = np.argsort(-scores, kind="stable")[:count]
        with self._path.open("rb") as file:
            return [self._hit(file, int(number), query) for number in order if scores[number] > 0]

    def _hit(self, file: Any, number: int, query: str) -> Hit:
        file.seek(self._places[number])
        row = _page(json.loads(file.readline()), self._page_url)
        return Hit(row["title"], row["url"], _snippet(row["text"], query))


class PageIndex(LocalPages):
    """An index folder made by ``afm serve wiki build``; its passages are pages of a site."""

    def __init__(self, index: Index, page_url: str) -> None:
        self._index = index
        self._page_url = page_url

    def _search(self, query: str, count: int) -> list[Hit]:
        [hits] = self._index.engine.search([query], count)
        pages = []
        for number, _ in hits:
            row = _page(json.loads(self._index.store.raw(number)), self._page_url)
            pages.append(Hit(row["title"], row["url"], _snippet(row["text"], query)))
        return pages


Provider = SearchService | LocalPages
"""``name`` is part of the cache key of searches; a search counts toward the budget of a run if it is ``paid``."""


def open_local(store: Path | None, page_url: str | None) -> Provider:
    """Open the pages at ``store``.

    Raises:
        ConfigError: The store is missing, or its pages have no address.
        DataError: The store is damaged.
    """
    store = _named(store, page_url)
    if page_url is None or store.is_file():
        return PageFile(store, page_url)
    return PageIndex(open_index(store), page_url)


def check_local(store: Path | None, page_url: str | None) -> None:
    """Raise the errors of :func:`open_local` without indexing the pages."""
    store = _named(store, page_url)
    if not store.is_file():
        checked_manifest(store)
    elif not sum(1 for _ in _rows(store, page_url)):  # reads every row, so that a bad one raises
        raise _no_page(store)


def _named(store: Path | None, page_url: str | None) -> Path:
    if store is None:
        raise ConfigError(
            "WEB_SEARCH_METHOD_TYPE is local, but WEB_PAGE_STORE is not set; set it to a JSONL file of pages {url, title, text} "
            "or to the folder of a wiki index, or choose serper or searxng"
        )
    if not store.exists():
        raise ConfigError(f"WEB_PAGE_STORE: {store}: no such file or folder")
    if page_url is not None and "{title}" not in page_url and "{id}" not in page_url:
        raise ConfigError(
            f"page_url: got {page_url!r}, expected an address that contains {{title}} or {{id}}"
        )
    if page_url is None and not store.is_file():
        raise ConfigError(
            f"{store}: the pages of an index have no address; set page_url in the server's YAML file"
        )
    return store


def _no_page(path: Path) -> DataError:
    return DataError("has no pages; expected rows {url, title, text}", path=str(path))


def _rows(path: Path, page_url: str | None) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the byte offset and the page of each row."""
    place = 0
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if raw.strip():
                try:
                    yield place, _page(json.loads(raw), page_url)
                except (ValueError, TypeError, KeyError) as error:
                    message = f"not a page ({error}); expected {{url, title, text}}"
                    raise DataError(message, path=str(path), line=line) from None
            place += len(raw)


def _page(row: dict[str, Any], page_url: str | None) -> dict[str, str]:
    """Return ``{url, title, text}`` of a page, or of a passage ``{id, contents}``."""
    if "contents" in row:
        title, _, text = str(row["contents"]).partition("\n")
        title = title.strip().strip('"')
    else:
        title, text = str(row["title"]), str(row["text"])
    url = row.get("url")
    if url is None:
        if page_url is None:
            raise ValueError("the page has no url, and page_url is not set")
        name = quote(title.replace(" ", "_"), errors="replace")
        number = quote(str(row.get("id", "")), errors="replace")
        url = page_url.replace("{title}", name).replace("{id}", number)
    return {"url": _sendable(str(url)), "title": _sendable(title), "text": _sendable(text)}


def _sendable(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can contain but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def _snippet(text: str, query: str) -> str:
    return " ".join(best_passages(text, query, _SNIPPET_CHARS, _SNIPPET_CHARS).split())


def open_provider(settings: SearchSettings, environment: Environment) -> Provider:
    """Open the provider that ``WEB_SEARCH_METHOD_TYPE`` names.

    Raises:
        ConfigError: The key, the address or the pages are missing.
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
            return SearchService("serper", service)
        case "searxng":
            if environment.searxng_base_url is None:
                raise ConfigError("WEB_SEARCH_METHOD_TYPE is searxng, but SEARXNG_BASE_URL is not set")
            service = Upstream("SearxNG", environment.searxng_base_url, patience=patience)
            return SearchService("searxng", service)
        case "local":
            return open_local(environment.web_page_store, settings.page_url)
