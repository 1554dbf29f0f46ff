"""A teacher's endpoint with scripted answers and faults, and real gateways in front of it."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from loopback import LoopbackServer

from afm.distill.model_calls import CallLog
from afm.settings import Environment
from tool_servers.gateway.server import Gateway as ServedGateway
from tool_servers.gateway.settings import GatewaySettings, open_routes

ROOT = Path(__file__).parents[3]
UPSTREAM_KEY = "sk-key-of-the-endpoint"
USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}


class Teacher:
    """An OpenAI-compatible endpoint. ``script`` gives the message for a request's body."""

    def __init__(self):
        self.script = lambda body: {"role": "assistant", "content": f"You said {said(body)}."}
        self.seen = []
        self.keys = []
        self.paths = []
        self.counts = Counter()
        self.most_at_once = 0
        self.pause = threading.Event()
        self._now = 0
        self._lock = threading.Lock()
        teacher = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                teacher.keys.append(self.headers["Authorization"])
                teacher.paths.append(self.path)
                if self.path.endswith("/refused"):
                    self.reply(401, {"error": {"message": f"Incorrect API key: {UPSTREAM_KEY}"}})
                else:
                    self.reply(200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with teacher._lock:
                    teacher.seen.append((self.path, body))
                    teacher.keys.append(self.headers["Authorization"])
                    teacher._now += 1
                    teacher.most_at_once = max(teacher.most_at_once, teacher._now)
                try:
                    fault = getattr(self, f"fault_{body.get('model')}", None)
                    if fault is not None:
                        fault(body)
                    elif body.get("stream"):
                        self.stream(body)
                    else:
                        self.reply(200, answer(body, teacher.script))
                except BrokenPipeError:
                    pass
                finally:
                    with teacher._lock:
                        teacher._now -= 1

            def reply(self, status, data, **headers):
                content = data if isinstance(data, bytes) else json.dumps(data).encode()
                length = str(len(content))
                self.begin(status, Content_Type="application/json", Content_Length=length, **headers)
                self.wfile.write(content)

            def begin(self, status=200, **headers):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()

            def begin_stream(self, **headers):
                self.begin(Content_Type="text/event-stream", Transfer_Encoding="chunked", **headers)

            def end_stream(self):
                self.chunk(b"data: [DONE]\n\n")
                self.wfile.write(b"0\r\n\r\n")

            def chunk(self, data):
                text = data if isinstance(data, bytes) else b"data: " + json.dumps(data).encode() + b"\n\n"
                self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
                self.wfile.flush()

            def stream(self, body):
                self.begin_stream()
                for piece in pieces(body, teacher.script):
                    self.chunk(piece)
                self.end_stream()

            def fault_busy(self, body):
                self.reply(429, {"error": {"message": "slow down"}}, Retry_After="7", X_RateLimit_Limit="3")

            def fault_broken(self, body):
                self.reply(500, {"error": {"message": f"Incorrect API key: {UPSTREAM_KEY}"}})

            def fault_telltale(self, body):
                """A stream that repeats the key, in two pieces, in an error; and a header that does."""
                self.begin_stream(OpenAI_Organization=f"of {UPSTREAM_KEY}")
                self.chunk(b'data: {"error": {"message": "Incorrect API key: ' + UPSTREAM_KEY[:8].encode())
                time.sleep(0.1)
                self.chunk(UPSTREAM_KEY[8:].encode() + b'"}}\n\n')
                self.wfile.write(b"0\r\n\r\n")

            def fault_objects(self, body):
                """Arguments of a call as an object, as some servers stream them."""
                self.begin_stream()
                function = {"name": "search", "arguments": {"query": "rain"}}
                self.chunk(chunk_of({"tool_calls": [{"index": 0, "id": 7, "function": function}]}))
                self.end_stream()

            def fault_half(self, body):
                self.reply(200, b'{"choices": [{"message": {"content": "Ha')

            def fault_cut(self, body):
                """Announces more than it sends, or breaks a stream off."""
                if body.get("stream"):
                    self.begin_stream()
                    self.chunk(chunk_of({"role": "assistant", "content": "Half a th"}))
                else:
                    content = json.dumps(answer(body, teacher.script)).encode()
                    self.begin(Content_Type="application/json", Content_Length=str(len(content)))
                    self.wfile.write(content[:30])
                    self.wfile.flush()
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
                time.sleep(0.1)
                self.connection.shutdown(socket.SHUT_RDWR)

            def fault_silent(self, body):
                teacher.pause.wait(20)

            def fault_slow(self, body):
                """The first word, then nothing until it is told."""
                self.begin_stream()
                self.chunk(chunk_of({"role": "assistant", "content": "First"}))
                teacher.pause.wait(20)
                self.chunk(chunk_of({"content": " last"}, finish_reason="stop"))
                self.end_stream()

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256
            daemon_threads = True

            def handle_error(self, *args):
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self):
        self.pause.set()
        self._server.shutdown()
        self._server.server_close()


def said(body):
    """The text of the last message."""
    if "prompt" in body:
        return body["prompt"]
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def answer(body, script):
    """The endpoint's answer; a script that gives a list gives several choices."""
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
    """The answer in pieces: each word, then each call with its arguments in two halves, then the usage if asked for."""
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
    teacher.stop()


class Gateway(LoopbackServer):
    """A gateway in a thread of its own.

    Its log holds no key of the endpoint, and nothing went wrong in it.
    """

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
        with self._filling.open("wb", buffering=0) as file:
            for size in (65536, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    pass

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
    """Starts gateways in front of the teacher, with these settings."""
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
        self.process.wait(20)


@pytest.fixture
def spawn(tmp_path, teacher):
    """Starts gateways as processes, all with one log; the words of those that cannot start are their errors."""
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
        told = process.stdout.readline()
        if not told:
            return process.communicate(timeout=20)[1]
        running.append(Process(process, told.split()[-1], tmp_path / "events.jsonl"))
        return running[-1]

    yield started
    for gateway in running:
        gateway.kill()
        told = gateway.process.communicate()[1]
        assert "Traceback" not in told
        assert UPSTREAM_KEY not in told
