"""A real page server as a process of its own, and a real web site to read, both on the loopback."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml
from tool_server import ToolServer

ROOT = Path(__file__).parents[3]
TOKEN = "a-long-random-token"


class Site:
    """A web site: path to (status, media type, body); counts what was asked for."""

    def __init__(self):
        self.pages = {}
        self.asked = []
        self.headers = []
        self.bodies = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                site.asked.append(self.path)
                site.headers.append(dict(self.headers))
                length = int(self.headers.get("Content-Length") or 0)
                self.body = self.rfile.read(length)
                site.bodies.append(self.body)
                page = site.pages.get(self.path.partition("?")[0], (404, "text/plain", b"no"))
                if callable(page):
                    page = page(self)
                if page is None:
                    return
                status, media_type, body = page
                self.send_response(status)
                self.send_header("Content-Type", media_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815 - the name that the server looks for

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.host}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def site():
    site = Site()
    yield site
    site.close()


@pytest.fixture
def another_site():
    site = Site()
    yield site
    site.close()


class WebClient:
    def post(self, path, *, token=TOKEN, **body):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60, trust_env=False)

    async def apost(self, client, path, **body):
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return await client.post(self.url + path, json=body, headers=headers, timeout=60)

    def metrics(self):
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.get(f"{self.url}/metrics", headers=headers, trust_env=False).text


class WebServerThread(WebClient, ToolServer):
    """A web server in this process."""


class WebServerProcess(WebClient):
    """A web server as its users start it."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log


@pytest.fixture
def start(tmp_path):
    """Starts the server of this name with these settings and variables."""
    servers = []

    def started(name, settings=None, **variables):
        usual = {"WEB_SERVER_TOKEN": TOKEN, "WEB_CACHE": tmp_path / "cache.sqlite"}
        server = WebServerThread(name, tmp_path, settings=settings or {}, **usual | variables)
        servers.append(server)
        return server

    yield started
    for server in servers:
        server.stop()


@pytest.fixture
def start_process(tmp_path):
    """Starts ``python -m tool_servers.NAME`` with a YAML of these settings and these variables."""
    processes = []

    def started(name, settings=None, *, port=0, **variables):
        config = tmp_path / f"{name} {len(processes)}.yaml"
        config.write_text(yaml.safe_dump(settings or {"max_parallel": 64}))
        log = tmp_path / f"log {len(processes)}"
        names = ("SUMMARY_", "JINA_", "WEB_", "SEARXNG_")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(names)}
        environment |= {
            "WEB_SERVER_TOKEN": TOKEN,
            "WEB_CACHE": str(tmp_path / "cache.sqlite"),
            "NO_PROXY": "127.0.0.1",
        } | {key: str(value) for key, value in variables.items()}
        process = subprocess.Popen(
            [sys.executable, "-m", "tool_servers", name, "--config", str(config), "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            cwd=ROOT,
            env=environment,
        )
        processes.append(process)
        line = process.stdout.readline()
        assert line.startswith("listening on "), log.read_text()
        return WebServerProcess(process, line.split()[-1], log)

    yield started
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(20)


@pytest.fixture
def spoil(tmp_path):
    """Puts this text in place of all that is cached."""

    def spoilt(text):
        with sqlite3.connect(tmp_path / "cache.sqlite") as store:
            assert store.execute("UPDATE texts SET value = ?", (zlib.compress(text.encode()),)).rowcount > 0

    return spoilt


@pytest.fixture
async def client():
    async with httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=600)) as client:
        yield client
