"""The wiki search tool: passages from wiki servers, or from any server with the protocol of Search-R1's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from afm.tools.base import ToolResult
from afm.tools.web_tool import ServerKind, WebTool, WebToolSettings

NOTHING_FOUND = "No passage was found."
_MAX_QUERY_CHARS = 2_000


class WikiSearchSettings(WebToolSettings):
    """Settings of :class:`WikiSearchTool` in a tools file. Without ``urls``: ``WIKI_RAG_SERVER_URL``."""

    topk: int = Field(default=3, ge=1, le=100)
    """Passages for a query."""
    max_passage_chars: int = Field(default=2_000, ge=100)
    """Longer passages are cut at the end."""
    timeout_s: float = Field(default=30.0, gt=0)
    tries: int = Field(default=4, ge=1)


class _Document(BaseModel):
    contents: str


class _Passage(BaseModel):
    document: _Document


class _PassageReply(BaseModel):
    result: Annotated[list[list[_Passage]], Field(min_length=1, max_length=1)]
    """For the one query that was asked."""


class WikiSearchTool(WebTool[WikiSearchSettings, str, _PassageReply]):
    """Shows the passages closest to a query, the closest first."""

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
        """The query, on one line."""
        query = " ".join(argument.split())
        if not query:
            raise cls.refusal("the query is empty")
        if len(query) > _MAX_QUERY_CHARS:
            raise cls.refusal(f"the query has {len(query)} characters, expected at most {_MAX_QUERY_CHARS}")
        return query

    def request(self, asked: str) -> Mapping[str, Any]:
        """A search for it."""
        return {"queries": [asked], "topk": self.settings.topk, "return_scores": True}

    def shown(self, reply: _PassageReply) -> ToolResult:
        """The passages, numbered."""
        most = self.settings.max_passage_chars
        passages = [
            _shown(number, passage.document.contents, most)
            for number, passage in enumerate(reply.result[0], 1)
        ]
        return ToolResult("\n\n".join(passages) or NOTHING_FOUND, meta={"hits": len(passages)})


def _shown(number: int, contents: str, max_chars: int) -> str:
    """``[1] Title`` and the text below it."""
    title, _, text = contents.strip().partition("\n")
    whole = f"[{number}] {title.strip().strip(chr(34))}\n{text.strip()}".rstrip()
    return whole if len(whole) <= max_chars else whole[: max_chars - 4].rstrip() + " ..."
