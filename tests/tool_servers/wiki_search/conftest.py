"""An encyclopaedia, its corpus and its index, and wiki servers on the loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tool_server import ToolServer, build_index, running

from afm.datasets.encyclopaedia import Encyclopaedia, write_corpus


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
    """Start a server with default settings. Its log also contains the output of later servers in this process."""
    with running(ToolServer, tmp_path_factory.mktemp("wiki server")) as start:
        yield start("wiki_search", "--index", index)


@pytest.fixture
def start(tmp_path: Path, index: Path) -> Iterator[Callable[..., ToolServer]]:
    """Start wiki servers that stop with the test."""
    with running(ToolServer, tmp_path, "Traceback") as start:
        yield lambda: start("wiki_search", "--index", index)
