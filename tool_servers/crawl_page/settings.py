"""Settings of the page reader."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from afm.configuration import read_file, validated
from tool_servers.shared.guard import DEFAULT_PORTS


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


class CrawlSettings(BaseModel):
    """The YAML of the page reader.

    Attributes:
        trusted: ``host:port`` pairs that are read although they are not public, e.g. a test site on this machine.
        ports: Ports of public hosts.
        max_urls: Pages of one request; further addresses are refused.
        max_bytes: Of a page as it comes, and after decompression.
        fetch_s: For one page, redirects included.
        max_page_chars: Of a page's text; its end is lost.
        shown_chars: Of a page that an agent is shown, when no model sums it up.
        parse_s: For turning one page into text.
        workers: Processes that do that; at most four, one for each core, when ``None``.
        cached_pages: Pages kept.
        cached_s: For how long.
        max_parallel: Requests at work at the same time.
        max_waiting: Requests that may wait; further ones get status 429.
        max_wait_s: The longest wait; then status 429.
        request_s: The longest time for a request that does not say how long its sender waits.
        finish_s: How long requests may go on when the server is told to stop.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    reader: Reader = Reader.DIRECT
    trusted: tuple[str, ...] = ()
    ports: tuple[int, ...] = tuple(sorted(DEFAULT_PORTS))
    max_urls: int = Field(default=8, ge=1)
    max_bytes: int = Field(default=10 << 20, ge=1024)
    fetch_s: float = Field(default=30.0, gt=0)
    max_page_chars: int = Field(default=300_000, ge=1000)
    shown_chars: int = Field(default=6_000, ge=200)
    parse_s: float = Field(default=10.0, gt=0)
    workers: int | None = Field(default=None, ge=1)
    cached_pages: int = Field(default=10_000, ge=1)
    cached_s: float = Field(default=3 * 3600.0, gt=0)
    summary: SummarySettings = SummarySettings()
    max_parallel: int = Field(default=64, ge=1)
    max_waiting: int = Field(default=512, ge=0)
    max_wait_s: float = Field(default=20.0, gt=0)
    request_s: float = Field(default=90.0, gt=0)
    finish_s: float = Field(default=10.0, gt=0)

    def worker_count(self) -> int:
        """Processes that turn pages into text."""
        return self.workers or min(4, len(os.sched_getaffinity(0)))


def load_crawl_settings(path: Path | None) -> CrawlSettings:
    """The settings in a YAML, the defaults without one.

    Raises:
        ConfigError: Names the file, the key path, the value and what was expected.
    """
    if path is None:
        return CrawlSettings()
    return validated(CrawlSettings, read_file(path, "page reader settings"), str(path))
