"""Web sites, code servers and a real Redis on the loopback."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import OWN_HOST, free_port
from site_server import Site
from tool_server import ToolServer, ToolServerProcess, build_index, running

TOKEN = "a-long-random-token"
QUICK = {"max_parallel": 2, "sandbox": {"backend": "bubblewrap"}}


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture
def another_site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ToolServer]]:
    """Start code servers with these settings."""
    with running(ToolServer, tmp_path, TOKEN) as start:
        yield lambda **settings: start("code", settings=QUICK | settings, CODE_SERVER_TOKEN=TOKEN)


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., ToolServerProcess]]:
    """Start code servers with these settings in separate processes."""
    with running(ToolServerProcess, tmp_path, TOKEN) as start:

        def started(*words: str, **settings: Any) -> ToolServerProcess:
            return start("code", *words, settings=QUICK | settings, CODE_SERVER_TOKEN=TOKEN)

        yield started


@pytest.fixture(scope="session")
def mill_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the index of a corpus with one passage."""
    folder = tmp_path_factory.mktemp("mill")
    (folder / "corpus.jsonl").write_text(
        '{"id": "0", "contents": "\\"Old Mill\\"\\nThe mill at the river was built in 1702."}\n'
    )
    assert build_index(folder / "corpus.jsonl", folder / "index").returncode == 0
    return folder / "index"


class RedisServer:
    """A real Redis that can be killed and started again on the same port.

    Its data survives a kill without `fsync`, which on a busy disk takes longer than a cache waits for an answer.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.url = f"redis://{OWN_HOST}:{self.port}/0"

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", OWN_HOST, "--appendonly", "yes"]
        command += ["--appendfsync", "no", "--save", "", "--dir", str(self._folder), "--logfile", "redis.log"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(1200):
            try:
                socket.create_connection((OWN_HOST, self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """Start a Redis server."""
    if shutil.which("redis-server") is None:
        pytest.skip("Redis is not installed: requirements/install-redis.sh")
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
