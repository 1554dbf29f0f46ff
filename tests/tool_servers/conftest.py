"""Real code servers and a real Redis: processes of their own on the loopback."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tool_server import ToolServer

ROOT = Path(__file__).parents[2]
TOKEN = "a-long-random-token"


class CodeClient:
    """Asks a code server at ``url``."""

    url: str

    def post(self, *, token: str = TOKEN, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.post(f"{self.url}/run", json=body, headers=headers, timeout=30, trust_env=False)

    def metric(self, name: str) -> float:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        text = httpx.get(f"{self.url}/metrics", headers=headers, trust_env=False).text
        [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(line.rpartition(" ")[2])


class CodeServerThread(CodeClient, ToolServer):
    """A code server in this process."""


@dataclass
class CodeServerProcess(CodeClient):
    """A code server as its users start it."""

    process: subprocess.Popen[str]
    url: str

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)


QUICK = {"max_parallel": 2, "sandbox": {"backend": "bubblewrap"}}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., CodeServerThread]]:
    """Starts a code server with these settings."""
    servers: list[CodeServerThread] = []

    def started(**settings: Any) -> CodeServerThread:
        server = CodeServerThread("code", tmp_path, settings=QUICK | settings, CODE_SERVER_TOKEN=TOKEN)
        servers.append(server)
        return server

    yield started
    for server in servers:
        server.stop()
        assert TOKEN not in server.log.read_text()


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., CodeServerProcess]]:
    """Starts a code server with these settings as a process of its own."""
    servers: list[CodeServerProcess] = []

    def started(*, port: int = 0, token: str = TOKEN, **settings: Any) -> CodeServerProcess:
        config = tmp_path / f"server {len(servers)}.yaml"
        config.write_text(yaml.safe_dump(QUICK | settings), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "tool_servers", "code", "--config", str(config), "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=(tmp_path / f"log {len(servers)}").open("w"),
            text=True,
            cwd=ROOT,
            env=os.environ | {"CODE_SERVER_TOKEN": token, "SERVER_HOST": "127.0.0.1"},
        )
        assert process.stdout is not None
        told = process.stdout.readline()
        assert told.startswith("listening on "), told
        servers.append(CodeServerProcess(process, told.split()[-1]))
        return servers[-1]

    yield started
    for server in servers:
        server.process.kill()
        server.process.wait()
        server.process.stdout.close()  # type: ignore[union-attr]
    for log in tmp_path.glob("log *"):
        assert TOKEN not in log.read_text()


class RedisServer:
    """A real one, that can be killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--appendonly", "yes"]
        command += ["--appendfsync", "always", "--dir", str(self._folder), "--logfile", "redis.log"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """Running."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs apt-get install redis-server")
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
