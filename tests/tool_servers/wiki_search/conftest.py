"""A world, its corpus and its index, and wiki servers on the loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tool_server import ToolServer, ToolServerProcess, build_index, running

from afm.datasets.encyclopaedia import Encyclopaedia, write_corpus

ROOT = Path(__file__).parents[3]
TOKEN = "a-long-random-token"


@pytest.fixture(scope="session")
def world() -> Encyclopaedia:
    return Encyclopaedia(2_000, seed=1, wordings=2)


@pytest.fixture(scope="session")
def corpus(world: Encyclopaedia, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a corpus") / "corpus.jsonl"
    write_corpus(world, path)
    return path


@pytest.fixture(scope="session")
def index(corpus: Path) -> Path:
    done = build_index(corpus, corpus.parent / "index")
    assert done.returncode == 0, done.stderr
    return corpus.parent / "index"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, index: Path) -> Iterator[ToolServer]:
    """One with the settings that it has by default. Its log also holds what later servers of the process write."""
    with running(ToolServer, tmp_path_factory.mktemp("wiki server")) as start:
        yield start("wiki_search", "--index", index)


@pytest.fixture
def start(tmp_path: Path, index: Path) -> Iterator[Callable[..., ToolServer]]:
    """Starts a wiki server with these settings."""
    with running(ToolServer, tmp_path, TOKEN, "Traceback") as start:

        def started(settings: dict[str, Any] | None = None, *, folder: Path = index, token: str = "") -> Any:
            return start("wiki_search", "--index", folder, settings=settings, WIKI_SERVER_TOKEN=token)

        yield started


@pytest.fixture
def start_process(tmp_path: Path, index: Path) -> Iterator[Callable[[], ToolServerProcess]]:
    """Starts a wiki server as a process of its own."""
    with running(ToolServerProcess, tmp_path, "Traceback") as start:
        yield lambda: start("wiki_search", "--index", index, settings={"finish_s": 10})
