"""Settings of the web search server."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from tool_servers.shared.settings import ServerSettings


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
