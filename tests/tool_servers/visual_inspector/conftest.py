"""A real image server, a vision endpoint that really decodes what it is sent, and a web site with pictures."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml
from PIL import Image
from tool_server import ToolServer

ROOT = Path(__file__).parents[3]
TOKEN = "a-long-random-token"
KEY = "sk-a-secret-key"


def encoded(kind="PNG", size=(40, 30), colour=(255, 0, 0), mode="RGB", **options):
    sink = io.BytesIO()
    Image.new(mode, size, colour).save(sink, kind, **options)
    return sink.getvalue()


class Service:
    """An HTTP service on the loopback; subclasses answer."""

    def __init__(self):
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, media_type, answer = service.answer(self.path, dict(self.headers), body)
                self.send_response(status)
                self.send_header("Content-Type", media_type)
                self.send_header("Content-Length", str(len(answer)))
                for name, value in service.more.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer)

            do_POST = do_GET  # noqa: N815 - the name that the server looks for

            def log_message(self, *args):
                pass

        self.more = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.host}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class Eyes(Service):
    """Chat completions with image content: says size, format and colour of what it is shown, and repeats the question."""

    def __init__(self):
        super().__init__()
        self.requests = []
        self.headers = []
        self.status, self.delay_s, self.reply = 200, 0.0, None

    def answer(self, path, headers, body):
        asked = json.loads(body)
        self.requests.append(asked)
        self.headers.append(headers)
        time.sleep(self.delay_s)
        if path != "/v1/chat/completions" or self.status != 200:
            return self.status if self.status != 200 else 404, "text/plain", KEY.encode()
        text, picture = asked["messages"][-1]["content"]
        head, _, data = picture["image_url"]["url"].partition(";base64,")
        with Image.open(io.BytesIO(base64.b64decode(data))) as seen:
            colour = seen.convert("RGB").getpixel((0, 0))
            said = f"{head} {seen.size} {colour} {text['text']}"
            self.info = dict(seen.info)
        reply = {"choices": [{"message": {"role": "assistant", "content": said}}]}
        return 200, "application/json", json.dumps(self.reply or reply).encode()


class Pictures(Service):
    """Files by path."""

    def __init__(self):
        super().__init__()
        self.files = {}
        self.accepted = []

    def answer(self, path, headers, body):
        self.accepted.append(headers.get("Accept"))
        return self.files.get(path, (404, "text/plain", b"no"))


@pytest.fixture
def eyes():
    eyes = Eyes()
    yield eyes
    eyes.close()


@pytest.fixture
def pictures():
    pictures = Pictures()
    yield pictures
    pictures.close()


class InspectorClient:
    def ask(self, image, question="", *, token=TOKEN, **more):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        body = {"image": image, "question": question} | more
        return httpx.post(f"{self.url}/inspect", json=body, headers=headers, timeout=60, trust_env=False)


def launched(tmp_path, settings, variables):
    config = tmp_path / "server.yaml"
    config.write_text(yaml.safe_dump({"max_parallel": 16} | settings))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VISION_")}
    environment |= {"WEB_SERVER_TOKEN": TOKEN, "WEB_CACHE": str(tmp_path / "cache.sqlite")}
    environment |= {"NO_PROXY": "127.0.0.1", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "tool_servers", "visual_inspector", "--config", str(config), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "log").open("a"),
        text=True,
        cwd=ROOT,
        env=environment,
    )


class InspectorThread(InspectorClient, ToolServer):
    """An image server in this process."""


class InspectorProcess(InspectorClient):
    """An image server as its users start it."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log


def usual(eyes):
    return {
        "VISION_OPENAI_API_BASE_URL": f"{eyes.url}/v1",
        "VISION_OPENAI_API_KEY": KEY,
        "VISION_MODEL": "eyes",
    }


@pytest.fixture
def start(tmp_path, eyes):
    """Starts an image server with these settings and variables."""
    servers = []

    def started(settings=None, **variables):
        web = {"WEB_SERVER_TOKEN": TOKEN, "WEB_CACHE": tmp_path / "cache.sqlite"}
        variables = usual(eyes) | web | variables
        servers.append(InspectorThread("visual_inspector", tmp_path, settings=settings or {}, **variables))
        return servers[-1]

    yield started
    for server in servers:
        server.stop()
        log = server.log.read_text()
        assert KEY not in log
        assert TOKEN not in log


@pytest.fixture
def start_process(tmp_path, eyes):
    """Starts an image server with these variables as a process of its own."""
    processes = []

    def started(**variables):
        variables = usual(eyes) | {key: str(value) for key, value in variables.items()}
        process = launched(tmp_path, {}, variables)
        processes.append(process)
        line = process.stdout.readline()
        assert line.startswith("listening on "), (tmp_path / "log").read_text()
        return InspectorProcess(process, line.split()[-1], tmp_path / "log")

    yield started
    for process in processes:
        process.terminate()
        assert process.wait(20) == 0
        process.stdout.close()
    log = (tmp_path / "log").read_text() if processes else ""
    assert KEY not in log
    assert TOKEN not in log


@pytest.fixture
def failed(tmp_path):
    """What a server that cannot start says, and its exit status."""

    def started(**variables):
        process = launched(tmp_path, {}, variables)
        process.communicate(timeout=30)
        return process.returncode, (tmp_path / "log").read_text()

    return started
