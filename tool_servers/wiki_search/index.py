"""Opening an index folder for search."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from afm.errors import ConfigError
from tool_servers.shared.settings import ServerSettings
from tool_servers.wiki_search.hits import Engine, Hybrid
from tool_servers.wiki_search.manifest import Manifest, checked_manifest
from tool_servers.wiki_search.passages import PassageStore


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


@dataclass(frozen=True, slots=True)
class Index:
    """An opened index.

    Attributes:
        engine_name: ``bm25``, ``dense`` or ``hybrid``.
    """

    manifest: Manifest
    store: PassageStore
    engine: Engine
    engine_name: str


def open_index(
    folder: Path,
    engine: str = "auto",
    *,
    model: str | None = None,
    device: str | None = None,
    verify: bool = False,
) -> Index:
    """Check an index and open the parts that ``engine`` needs, memory-mapped.

    Args:
        verify: Read every byte of the index and compare checksums.

    Raises:
        DataError: The index is unfinished, truncated, or mixed from different builds.
        ConfigError: The index lacks the part that ``engine`` needs.
    """
    manifest = checked_manifest(folder, whole=verify)
    name = served_engine(folder, manifest, engine)
    store = PassageStore(folder, expected=manifest.passages)
    parts: list[Engine] = []
    if name in ("bm25", "hybrid"):
        from tool_servers.wiki_search.bm25 import Bm25

        parts.append(Bm25(folder))
    if name in ("dense", "hybrid"):
        assert manifest.dense is not None
        from tool_servers.wiki_search.dense import Dense

        parts.append(Dense(folder, manifest.dense, manifest.passages, model=model, device=device))
    return Index(manifest, store, parts[0] if len(parts) == 1 else Hybrid(parts), name)


def served_engine(folder: Path, manifest: Manifest, engine: str) -> str:
    """``bm25``, ``dense`` or ``hybrid``.

    Raises:
        ConfigError: The index lacks a part that it needs; the message has the command that adds it.
    """
    name = engine if engine != "auto" else "bm25" if manifest.bm25 else "dense"
    if name != "dense" and manifest.bm25 is None:
        raise ConfigError(
            f"{folder}: has no BM25 part; add it: afm serve wiki build CORPUS --engine bm25 --out {folder}"
        )
    if name != "bm25" and manifest.dense is None:
        raise ConfigError(
            f"{folder}: has no dense part; add it: afm serve wiki build CORPUS --engine dense --model M --out {folder}"
        )
    return name
