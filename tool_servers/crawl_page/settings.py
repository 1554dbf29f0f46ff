"""Settings of the page reader."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from tool_servers.shared.settings import FetcherSettings


class Reader(StrEnum):
    """Who fetches pages."""

    DIRECT = "direct"
    """This server."""
    JINA = "jina"
    """A reader service at ``JINA_BASE_URL``."""


class SummarySettings(BaseModel):
    """How pages are summed up by the model at ``SUMMARY_OPENAI_API_BASE_URL``, when it is set.

    Attributes:
        chunk_chars: Of a page that the model reads at once.
        max_chunks: Of longer pages, the chunks nearest to the goal.
        max_tokens: Of a reply.
        total_s: For a page; then, or when the model fails, the best passages stand in.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    chunk_chars: int = Field(default=24_000, ge=1000)
    max_chunks: int = Field(default=6, ge=1)
    max_tokens: int = Field(default=800, ge=16)
    total_s: float = Field(default=45.0, gt=0)


class CrawlSettings(FetcherSettings):
    """The YAML of the page reader.

    Attributes:
        max_urls: Pages of one request; further addresses are refused.
        max_page_chars: Of a page's text; its end is lost.
        shown_chars: Of a page that an agent is shown, when no model sums it up.
        parse_s: For turning one page into text.
        cached_pages: Pages kept.
    """

    content: ClassVar[str] = "page reader settings"

    reader: Reader = Reader.DIRECT
    max_urls: int = Field(default=8, ge=1)
    max_page_chars: int = Field(default=300_000, ge=1000)
    shown_chars: int = Field(default=6_000, ge=200)
    parse_s: float = Field(default=10.0, gt=0)
    cached_pages: int = Field(default=10_000, ge=1)
    summary: SummarySettings = SummarySettings()
