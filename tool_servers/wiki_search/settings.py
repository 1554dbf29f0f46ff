"""Settings of the wiki server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from afm.configuration import read_file, validated


class WikiServerSettings(BaseModel):
    """The YAML of a wiki server.

    Attributes:
        index: Folder that ``afm serve wiki build`` made.
        engine: ``auto`` takes BM25 where the index has it, else the dense part.
        model: Embedding model, when it lies elsewhere than at build time.
        device: Of the embedding model.
        topk: Passages for a query of a request that does not say how many.
        max_queries: Of one request.
        max_parallel: Requests at work at the same time.
        max_waiting: Requests that may wait for one of those places; further ones get status 429.
        max_wait_s: The longest wait; then status 429.
        search_s: The longest search; then status 503.
        threads: Searches at the same time; the number of cores when ``None``.
        finish_s: How long requests may go on when the server is told to stop.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: Path | None = None
    engine: Literal["auto", "bm25", "dense", "hybrid"] = "auto"
    model: str | None = None
    device: str | None = None
    topk: int = Field(default=3, ge=1)
    max_topk: int = Field(default=100, ge=1)
    max_queries: int = Field(default=1024, ge=1)
    max_query_chars: int = Field(default=8_192, ge=1)
    max_request_bytes: int = Field(default=8 << 20, ge=1024)
    max_parallel: int = Field(default=256, ge=1)
    max_waiting: int = Field(default=2_048, ge=0)
    max_wait_s: float = Field(default=30.0, gt=0)
    search_s: float = Field(default=60.0, gt=0)
    threads: int | None = Field(default=None, ge=1)
    finish_s: float = Field(default=10.0, gt=0)

    def workers(self) -> int:
        """Searches at the same time."""
        return self.threads or len(os.sched_getaffinity(0))


def load_server_settings(path: Path | None) -> WikiServerSettings:
    """The settings in a YAML, the defaults without one; ``index`` is relative to the working folder.

    Raises:
        ConfigError: Names the file, the key path, the value and what was expected.
    """
    if path is None:
        return WikiServerSettings()
    return validated(WikiServerSettings, read_file(path, "wiki server settings"), str(path))
