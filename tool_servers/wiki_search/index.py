"""Opening an index folder for search."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from afm.errors import ConfigError
from tool_servers.wiki_search.hits import Engine, Hybrid
from tool_servers.wiki_search.manifest import Manifest, checked_manifest
from tool_servers.wiki_search.passages import PassageStore


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
