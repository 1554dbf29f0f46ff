"""A world, its corpus and its index, and real wiki servers: processes of their own on the loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tool_server import ToolServer

from afm.datasets.encyclopaedia import Encyclopaedia, write_corpus

ROOT = Path(__file__).parents[3]
TOKEN = "a-long-random-token"


class WikiClient:
    """Asks a wiki server at ``url``."""

    url: str

    def post(self, *, token: str | None = None, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.post(f"{self.url}/retrieve", json=body, headers=headers, timeout=30, trust_env=False)


class WikiServerThread(WikiClient, ToolServer):
    """A wiki server in this process."""


@dataclass
class WikiServerProcess(WikiClient):
    """A wiki server as its users start it."""

    process: subprocess.Popen[str]
    url: str

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)


def build(corpus: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "tool_servers.wiki_search.build",
        str(corpus),
        "--out",
        str(out),
        *options,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


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
    done = build(corpus, corpus.parent / "index")
    assert done.returncode == 0, done.stderr
    return corpus.parent / "index"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, index: Path) -> Iterator[WikiServerThread]:
    """One with the settings that it has by default."""
    server = WikiServerThread("wiki_search", tmp_path_factory.mktemp("wiki server"), "--index", index)
    yield server
    server.stop()


@pytest.fixture
def start(tmp_path: Path, index: Path) -> Iterator[Callable[..., WikiServerThread]]:
    """Starts a wiki server with these settings."""
    servers: list[WikiServerThread] = []

    def started(settings: dict[str, Any] | None = None, *, folder: Path = index, token: str = "") -> Any:
        variables = {"WIKI_SERVER_TOKEN": token} if token else {}
        server = WikiServerThread(
            "wiki_search", tmp_path, "--index", folder, settings=settings or {}, **variables
        )
        servers.append(server)
        return server

    yield started
    for server in servers:
        server.stop()
        assert TOKEN not in server.log.read_text()


@pytest.fixture
def start_process(tmp_path: Path, index: Path) -> Iterator[Callable[..., WikiServerProcess]]:
    """Starts a wiki server as a process of its own."""
    servers: list[WikiServerProcess] = []

    def started(*options: str, folder: Path = index, token: str = "") -> WikiServerProcess:
        command = [
            sys.executable,
            "-m",
            "tool_servers",
            "wiki_search",
            "--index",
            str(folder),
            "--port",
            "0",
            *options,
        ]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=(tmp_path / f"log {len(servers)}").open("w"),
            text=True,
            cwd=ROOT,
            env=os.environ | {"WIKI_SERVER_TOKEN": token, "SERVER_HOST": "127.0.0.1"},
        )
        assert process.stdout is not None
        told = process.stdout.readline()
        assert told.startswith("listening on "), (tmp_path / f"log {len(servers)}").read_text()
        servers.append(WikiServerProcess(process, told.split()[-1]))
        return servers[-1]

    yield started
    for server in servers:
        server.process.kill()
        server.process.wait()
        server.process.stdout.close()  # type: ignore[union-attr]
    for log in tmp_path.glob("log *"):
        assert TOKEN not in log.read_text()
        assert "Traceback" not in log.read_text()
