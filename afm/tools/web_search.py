"""The web search tool: results from a search server, as an agent reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from afm.tools.base import ToolResult
from afm.tools.web_tool import ServerKind, WebTool, WebToolSettings

NOTHING_FOUND = "No page was found. Try other or fewer words."


class WebSearchSettings(WebToolSettings):
    """Settings of :class:`WebSearchTool` in a tools file. Without ``urls``: ``SERVER_HOST`` and ``WEBSEARCH_PORT``."""

    results: int = Field(default=10, ge=1, le=100)
    """Of one search."""
    run: str = ""
    """Name of the run whose budget pays, when the server has one."""
    timeout_s: float = Field(default=70.0, gt=0)
    """For one request; longer than the server's own patience with its provider."""
    tries: int = Field(default=3, ge=1)


class _Hit(BaseModel):
    title: str = ""
    link: str
    snippet: str = ""


class _SearchReply(BaseModel):
    organic: list[_Hit]
    cached: bool = False


class WebSearchTool(WebTool[WebSearchSettings, str, _SearchReply]):
    """Shows titles, addresses and short extracts of the pages that fit a query."""

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
        """The query, on one line."""
        query = " ".join(argument.split())
        if not query:
            raise cls.refusal("the query is empty")
        return query

    def request(self, asked: str) -> Mapping[str, Any]:
        """A search for it."""
        return {"q": asked, "num": self.settings.results, "run": self.settings.run}

    def shown(self, reply: _SearchReply) -> ToolResult:
        """The results, numbered."""
        hits = [_shown(number, hit) for number, hit in enumerate(reply.organic, 1)]
        return ToolResult(
            "\n\n".join(hits) or NOTHING_FOUND, meta={"hits": len(hits), "cached": reply.cached}
        )


def _shown(number: int, hit: _Hit) -> str:
    return "\n".join(part for part in (f"[{number}] {hit.title}", hit.link, hit.snippet) if part)
