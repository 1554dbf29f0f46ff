"""The search tools: pages from a web search server, and passages from wiki servers or others with Search-R1's protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from afm.tools.base import ToolResult
from afm.tools.web_tool import ServerKind, WebTool, WebToolSettings

NO_PAGE = "No page was found. Try other or fewer words."
NO_PASSAGE = "No passage was found."
_MAX_QUERY_CHARS = 2_000


class WebSearchSettings(WebToolSettings):
    """Settings of :class:`WebSearchTool` in a tools file. Without ``urls``: ``SERVER_HOST`` and ``WEBSEARCH_PORT``."""

    results: int = Field(default=10, ge=1, le=100)
    """Results of one search."""
    run: str = ""
    """Name of the run whose budget the search counts towards, if the server has budgets."""
    timeout_s: float = Field(default=70.0, gt=0)
    """Time limit of a request in seconds. It exceeds the server's own limit for its provider."""
    tries: int = Field(default=3, ge=1)


class _Hit(BaseModel):
    title: str = ""
    link: str
    snippet: str = ""


class _SearchReply(BaseModel):
    organic: list[_Hit]
    cached: bool = False


class WebSearchTool(WebTool[WebSearchSettings, str, _SearchReply]):
    """Returns titles, addresses and short extracts of the pages that match a query."""

    settings_type = WebSearchSettings
    reply_type = _SearchReply
    server = ServerKind(
        path="/search",
        answer="{organic: [{title, link, snippet}]}",
        token="WEB_SERVER_TOKEN",
        address=lambda environment: environment.server_address(environment.websearch_port),
    )
    usual_name = "web_search"
    failure = "nothing was searched"

    @classmethod
    def read(cls, argument: str) -> str:
        """Return the query on one line."""
        return _query(cls, argument)

    def request(self, asked: str) -> Mapping[str, Any]:
        """Return the request body of a search."""
        return {"q": asked, "num": self.settings.results, "run": self.settings.run}

    def shown(self, reply: _SearchReply) -> ToolResult:
        """Return the numbered results."""
        hits = [_hit(number, hit) for number, hit in enumerate(reply.organic, 1)]
        return ToolResult("\n\n".join(hits) or NO_PAGE, meta={"hits": len(hits), "cached": reply.cached})


def _query(tool: type[WebTool[Any, Any, Any]], argument: str) -> str:
    if query := " ".join(argument.split()):
        return query
    raise tool.refusal("the query is empty")


def _hit(number: int, hit: _Hit) -> str:
    return "\n".join(part for part in (f"[{number}] {hit.title}", hit.link, hit.snippet) if part)


class WikiSearchSettings(WebToolSettings):
    """Settings of :class:`WikiSearchTool` in a tools file. Without ``urls``: ``WIKI_RAG_SERVER_URL``."""

    topk: int = Field(default=3, ge=1, le=100)
    """Passages per query."""
    max_passage_chars: int = Field(default=2_000, ge=100)
    """Longest passage, in characters. Longer ones are cut at the end."""
    timeout_s: float = Field(default=30.0, gt=0)
    tries: int = Field(default=4, ge=1)


class _Document(BaseModel):
    contents: str


class _Passage(BaseModel):
    document: _Document


class _PassageReply(BaseModel):
    result: Annotated[list[list[_Passage]], Field(min_length=1, max_length=1)]
    """The passages of the single query."""


class WikiSearchTool(WebTool[WikiSearchSettings, str, _PassageReply]):
    """Returns the passages closest to a query, the closest first."""

    settings_type = WikiSearchSettings
    reply_type = _PassageReply
    server = ServerKind(
        path="/retrieve",
        answer="{result: [[{document: {contents}, score}]]}",
        token="WIKI_SERVER_TOKEN",
        address=lambda environment: environment.wiki_rag_server_url,
    )
    usual_name = "wiki_search"
    failure = "nothing was searched"

    @classmethod
    def read(cls, argument: str) -> str:
        """Return the query on one line."""
        query = _query(cls, argument)
        if len(query) > _MAX_QUERY_CHARS:
            raise cls.refusal(f"the query has {len(query)} characters, expected at most {_MAX_QUERY_CHARS}")
        return query

    def request(self, asked: str) -> Mapping[str, Any]:
        """Return the request body of a search."""
        return {"queries": [asked], "topk": self.settings.topk, "return_scores": True}

    def shown(self, reply: _PassageReply) -> ToolResult:
        """Return the numbered passages."""
        most = self.settings.max_passage_chars
        passages = [
            _passage(number, passage.document.contents, most)
            for number, passage in enumerate(reply.result[0], 1)
        ]
        return ToolResult("\n\n".join(passages) or NO_PASSAGE, meta={"hits": len(passages)})


def _passage(number: int, contents: str, max_chars: int) -> str:
    """Return ``[1] Title`` and the text below it."""
    title, _, text = contents.strip().partition("\n")
    whole = f"[{number}] {title.strip().strip(chr(34))}\n{text.strip()}".rstrip()
    return whole if len(whole) <= max_chars else whole[: max_chars - 4].rstrip() + " ..."
