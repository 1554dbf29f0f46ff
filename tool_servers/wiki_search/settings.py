"""Settings of the wiki server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from tool_servers.shared.settings import ServerSettings


class WikiServerSettings(ServerSettings):
    """The YAML of a wiki server.

    Attributes:
        index: Folder that ``afm serve wiki build`` made.
        engine: ``auto`` takes BM25 where the index has it, else the dense part.
        model: Embedding model, when it lies elsewhere than at build time.
        device: Of the embedding model.
        topk: Passages for a query of a request that does not say how many.
        max_queries: Of one request; Search-R1 sends 512 x 5.
        max_query_chars: A longer query is searched for by its beginning, and the answer says so.
        max_request_bytes: Of one request: the most queries of the greatest length, two bytes a character.
        search_s: The longest search; then status 503.
        threads: Searches at the same time; the number of cores when ``None``.
    """

    content: ClassVar[str] = "wiki server settings"

    index: Path | None = None
    engine: Literal["auto", "bm25", "dense", "hybrid"] = "auto"
    model: str | None = None
    device: str | None = None
    topk: int = Field(default=3, ge=1)
    max_topk: int = Field(default=100, ge=1)
    max_queries: int = Field(default=4_096, ge=1)
    max_query_chars: int = Field(default=8_192, ge=1)
    max_request_bytes: int = Field(default=64 << 20, ge=1024)
    max_parallel: int = Field(default=256, ge=1)
    max_waiting: int = Field(default=2_048, ge=0)
    max_wait_s: float = Field(default=30.0, gt=0)
    search_s: float = Field(default=60.0, gt=0)
    threads: int | None = Field(default=None, ge=1)

    def workers(self) -> int:
        """Searches at the same time."""
        return self.threads or len(os.sched_getaffinity(0))
