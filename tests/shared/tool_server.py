"""Tool servers for tests, in a thread of this process or in a separate process."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import yaml
from loopback import LoopbackServer

from afm.endpoints.connections import environment_key
from afm.settings import Environment
from tool_servers.shared.command import KINDS, load_server, parse_launch
from tool_servers.wiki_search import build

ROOT = Path(__file__).parents[2]
_PATHS = {"code": "/run", "visual_inspector": "/inspect", "wiki_search": "/retrieve"}
_LOGGERS = (None, "uvicorn")


class ServerClient:
    """A client of the server ``name`` at ``url``; sends its ``token`` unless a request has another."""

    name: str
    url: str
    token: str

    def post(self, path: str = "", *, token: str | None = None, **body: Any) -> httpx.Response:
        place = self.url + (path or _PATHS[self.name])
        return httpx.post(place, json=body, headers=self._headers(token), timeout=60, trust_env=False)

    async def apost(self, client: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
        return await client.post(self.url + path, json=body, headers=self._headers(None), timeout=60)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", headers=self._headers(None), timeout=60, trust_env=False).text

    def metric(self, name: str) -> float:
        [line] = [line for line in self.metrics().splitlines() if line.startswith(f"{name} ")]
        return float(line.rpartition(" ")[2])

    def _headers(self, token: str | None) -> dict[str, str]:
        token = self.token if token is None else token
        return {"Authorization": f"Bearer {token}"} if token else {}


def _words(name: str, folder: Path, words: tuple[object, ...], settings: dict[str, Any] | None) -> list[str]:
    """Return a command line, with the settings in a file."""
    number = len(list(folder.glob(f"{name} *.yaml")))
    config = folder / f"{name} {number}.yaml"
    config.write_text(yaml.safe_dump({"finish_s": 1} | (settings or {})))
    return [*map(str, words), *(["--config", str(config)] if KINDS[name].config else [])]


class ToolServer(ServerClient, LoopbackServer):
    """The server of ``python -m tool_servers NAME`` in a thread of this process.

    Args:
        folder: Folder for its settings and log.
        words: Command line arguments.
        settings: Content of its YAML.
        variables: Environment variables.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *words: object,
        settings: dict[str, Any] | None = None,
        **variables: object,
    ) -> None:
        environment = Environment(**{key.lower(): str(value) for key, value in variables.items() if value})
        options = ["--host", "127.0.0.1", *_words(name, folder, words, settings)]
        launch = parse_launch(name, options, environment)
        super().__init__(load_server(name).open_app(launch).config())
        self.name, self.url, self.token = (
            name,
            self.origin,
            environment_key(KINDS[name].token, environment) or "",
        )
        self.log = folder / f"{name} {self.port}.log"
        self._handler = logging.FileHandler(self.log)
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self._handler)
        self.start()

    def stop(self, *, forced: bool = False) -> None:
        super().stop(forced=forced)
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self._handler)
        self._handler.close()


class ToolServerProcess(ServerClient):
    """``python -m tool_servers NAME``, with the arguments of :class:`ToolServer`."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *words: object,
        settings: dict[str, Any] | None = None,
        **variables: object,
    ) -> None:
        own = {"SERVER_HOST": "127.0.0.1", "NO_PROXY": "127.0.0.1"} | variables
        self.name, self.token = name, str(variables.get(KINDS[name].token, ""))
        options = ["--port", "0", *_words(name, folder, words, settings)]
        self.log = folder / f"{name} {len(list(folder.glob('*.log')))}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tool_servers", name, *options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=os.environ | {key: str(value) for key, value in own.items()},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), self.log.read_text()
        self.url = line.split()[-1]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def stop(self) -> None:
        assert self.process.stdout is not None
        self.process.terminate()
        self.process.wait(60)
        self.process.stdout.close()


@contextmanager
def running(
    kind: type[ToolServer] | type[ToolServerProcess], folder: Path, *unlogged: str
) -> Iterator[Callable[..., Any]]:
    """Start servers of this kind; stop all at the end, and check that no log contains these words."""
    servers: list[ToolServer | ToolServerProcess] = []

    def start(name: str, *words: object, **options: Any) -> Any:
        servers.append(kind(name, folder, *words, **options))
        return servers[-1]

    try:
        yield start
    finally:
        for server in servers:
            server.stop()
    for server in servers:
        lines = server.log.read_text().splitlines()
        assert not [line for line in lines if any(word in line for word in unlogged)]


def build_index(corpus: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m tool_servers.wiki_search.build`` in this process."""
    words = [str(corpus), "--output-dir", str(out), *options]
    stdout, stderr = StringIO(), StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            status = build.main(words)
        except SystemExit as end:
            status = int(end.code or 0)
    return subprocess.CompletedProcess(words, status, stdout.getvalue(), stderr.getvalue())
