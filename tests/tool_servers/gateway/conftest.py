"""A teacher's endpoint with scripted answers and faults, and real gateways in front of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from loopback import LoopbackServer
from site_server import Site

from afm.distill.model_calls import CallLog
from afm.settings import Environment
from tool_servers.gateway.server import Gateway as ServedGateway
from tool_servers.gateway.settings import GatewaySettings, open_routes

ROOT = Path(__file__).parents[3]
UPSTREAM_KEY = "sk-key-of-the-endpoint"
JSON = "application/json"
WRONG_KEY = json.dumps({"error": {"message": f"Incorrect API key: {UPSTREAM_KEY}"}}).encode()
MODELS = (200, JSON, b'{"object": "list", "data": [{"id": "tiny", "object": "model"}]}')
USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}


def begin(handler, status=200, **headers):
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()


def begin_stream(handler, **headers):
    begin(handler, Content_Type="text/event-stream", Transfer_Encoding="chunked", **headers)


def chunk(handler, data):
    text = data if isinstance(data, bytes) else b"data: " + json.dumps(data).encode() + b"\n\n"
    handler.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")


def end_stream(handler):
    chunk(handler, b"data: [DONE]\n\n")
    handler.wfile.write(b"0\r\n\r\n")


class Teacher(Site):
    """An OpenAI-compatible endpoint. ``script`` gives the message for a request's body; the name of a model may select a fault."""

    def __init__(self):
        super().__init__()
        self.url += "/v1"
        self.script = lambda body: {"role": "assistant", "content": f"You said {said(body)}."}
        self.most_at_once = 0
        self.pause = threading.Event()
        self._now = 0
        self._lock = threading.Lock()
        self.pages["/v1/models"] = MODELS
        self.pages["/v1/chat/completions"] = self.pages["/v1/completions"] = self.complete

    @property
    def keys(self):
        return [headers["Authorization"] for headers in self.headers]

    @property
    def seen(self):
        """The bodies of the requests."""
        return [json.loads(body) for body in self.bodies if body]

    def complete(self, handler):
        body = json.loads(handler.body)
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            fault = getattr(self, f"fault_{body.get('model')}", None)
            if fault is not None:
                return fault(handler, body)
            if not body.get("stream"):
                return 200, JSON, json.dumps(answer(body, self.script)).encode()
            begin_stream(handler)
            for piece in pieces(body, self.script):
                chunk(handler, piece)
            end_stream(handler)
        except BrokenPipeError:
            pass
        finally:
            with self._lock:
                self._now -= 1

    def fault_busy(self, handler, body):
        said = b'{"error": {"message": "slow down"}}'
        about = {"Content_Length": str(len(said)), "Retry_After": "7", "X_RateLimit_Limit": "3"}
        begin(handler, 429, Content_Type=JSON, **about)
        handler.wfile.write(said)

    def fault_broken(self, handler, body):
        return 500, JSON, WRONG_KEY

    def fault_telltale(self, handler, body):
        """Send a stream whose error repeats the key in two pieces, and a header that contains it."""
        begin_stream(handler, OpenAI_Organization=f"of {UPSTREAM_KEY}")
        chunk(handler, b'data: {"error": {"message": "Incorrect API key: ' + UPSTREAM_KEY[:8].encode())
        time.sleep(0.1)
        chunk(handler, UPSTREAM_KEY[8:].encode() + b'"}}\n\n')
        handler.wfile.write(b"0\r\n\r\n")

    def fault_objects(self, handler, body):
        """Send the arguments of a call as an object, as some servers do."""
        begin_stream(handler)
        function = {"name": "search", "arguments": {"query": "rain"}}
        chunk(handler, chunk_of({"tool_calls": [{"index": 0, "id": 7, "function": function}]}))
        end_stream(handler)

    def fault_half(self, handler, body):
        return 200, JSON, b'{"choices": [{"message": {"content": "Ha'

    def fault_cut(self, handler, body):
        """Announce more than is sent, or cut off a stream."""
        if body.get("stream"):
            begin_stream(handler)
            chunk(handler, chunk_of({"role": "assistant", "content": "Half a th"}))
        else:
            content = json.dumps(answer(body, self.script)).encode()
            begin(handler, Content_Type=JSON, Content_Length=str(len(content)))
            handler.wfile.write(content[:30])
        handler.close_connection = True
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        time.sleep(0.1)
        handler.connection.shutdown(socket.SHUT_RDWR)

    def fault_silent(self, handler, body):
        self.pause.wait(60)

    def fault_slow(self, handler, body):
        """Send the first word, and the rest after ``pause`` is set."""
        begin_stream(handler)
        chunk(handler, chunk_of({"role": "assistant", "content": "First"}))
        self.pause.wait(60)
        chunk(handler, chunk_of({"content": " last"}, finish_reason="stop"))
        end_stream(handler)


def said(body):
    """Return the text of the last message."""
    if "prompt" in body:
        return body["prompt"]
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def answer(body, script):
    """Return the answer of the endpoint; a script that returns a list gives several choices."""
    said = script(body)
    choices = []
    for index, message in enumerate(said if isinstance(said, list) else [said]):
        choice = {"index": index, "finish_reason": "tool_calls" if message.get("tool_calls") else "stop"}
        choices.append(choice | ({"text": message["content"]} if "prompt" in body else {"message": message}))
    return about("chat.completion", choices, usage=USAGE)


def about(kind, choices, **extra):
    return {"id": "c1", "object": kind, "created": 1, "model": "tiny-1", "choices": choices, **extra}


def chunk_of(delta, finish_reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return about("chat.completion.chunk", [choice])


def pieces(body, script):
    """Yield the answer in pieces: words, then calls with their arguments in two halves, then the usage if requested."""
    message = script(body)
    yield chunk_of({"role": "assistant", "content": ""})
    words = (message.get("content") or "").split(" ")
    for number, word in enumerate(words):
        yield chunk_of({"content": word if number == 0 else f" {word}"})
    for index, call in enumerate(message.get("tool_calls") or ()):
        arguments = call["function"]["arguments"]
        begun = {"name": call["function"]["name"], "arguments": arguments[:5]}
        yield chunk_of(
            {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": begun}]}
        )
        yield chunk_of({"tool_calls": [{"index": index, "function": {"arguments": arguments[5:]}}]})
    yield chunk_of({}, finish_reason="tool_calls" if message.get("tool_calls") else "stop")
    if (body.get("stream_options") or {}).get("include_usage"):
        yield about("chat.completion.chunk", [], usage=USAGE)


@pytest.fixture
def teacher():
    teacher = Teacher()
    yield teacher
    teacher.pause.set()
    teacher.close()


class Gateway(LoopbackServer):
    """A gateway in a thread. Its log must not contain the key of the endpoint."""

    def __init__(self, teacher, log, *, token=None, upstream=None, config=None):
        settings = GatewaySettings.model_validate(config or {})
        url = None if upstream == "" else upstream or teacher.url
        environment = Environment(gateway_upstream_api_key=UPSTREAM_KEY)
        self.log = log
        self._calls = CallLog(log)
        self._calls.__enter__()
        app = ServedGateway(settings, open_routes(settings, environment, url), self._calls, token).app()
        super().__init__(app, timeout_graceful_shutdown=1)
        self.url = self.origin
        self.start()

    @property
    def base(self):
        return f"{self.url}/v1"

    def stop(self):
        super().stop()
        self._calls.__exit__()
        assert UPSTREAM_KEY not in self.log.read_text()


class SmallDisk:
    """A file system of 4 MiB that can be filled."""

    def __init__(self, folder):
        self.folder = folder
        self._filling = folder / "filling"

    def fill(self):
        with self._filling.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.folder).free)

    def empty(self):
        self._filling.unlink()


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root and CAP_SYS_ADMIN")
    yield SmallDisk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def start(tmp_path, teacher, caplog):
    """Start gateways in front of the teacher, with these settings; none may log an exception."""
    running = []

    def started(*, folder=tmp_path, **options):
        running.append(Gateway(teacher, folder / f"events{len(running) or ''}.jsonl", **options))
        return running[-1]

    yield started
    teacher.pause.set()
    for gateway in running:
        gateway.stop()
    assert not [record for record in caplog.records if record.exc_info], "something went wrong in a gateway"


@pytest.fixture
def gateway(start):
    return start()


class Process:
    """A gateway as ``afm serve gateway`` starts it."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log

    @property
    def base(self):
        return f"{self.url}/v1"

    def kill(self):
        self.process.kill()
        self.process.wait(60)


@pytest.fixture
def spawn(tmp_path, teacher):
    """Start gateway processes that share a log; for one that cannot start, return its error output."""
    running = []

    def started():
        command = [sys.executable, "-P", "-m", "afm.cli.main", "serve", "gateway", "--port=0"]
        process = subprocess.Popen(
            [*command, f"--upstream={teacher.url}", f"--log={tmp_path / 'events.jsonl'}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ
            | {"GATEWAY_TOKEN": "", "GATEWAY_UPSTREAM_API_KEY": UPSTREAM_KEY, "SERVER_HOST": "127.0.0.1"},
        )
        printed = process.stdout.readline()
        if not printed:
            return process.communicate(timeout=60)[1]
        running.append(Process(process, printed.split()[-1], tmp_path / "events.jsonl"))
        return running[-1]

    yield started
    for gateway in running:
        gateway.kill()
        printed = gateway.process.communicate()[1]
        assert "Traceback" not in printed
        assert UPSTREAM_KEY not in printed
