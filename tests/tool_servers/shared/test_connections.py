"""A real server with clients that connect but send no request."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[3]
SERVER = """
import asyncio, signal, sys
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from tool_servers.shared.command import Address
from tool_servers.shared.serve import ServedApp, serve

async def health(request):
    return JSONResponse({"status": "ok"})

released = asyncio.Event()

async def slow(request):
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, released.set)
    print("at work", flush=True)
    await released.wait()
    return JSONResponse({"status": "slow"})

app = Starlette(routes=[Route("/health", health), Route("/slow", slow)])
serve(ServedApp(app, None, 1, head_s=float(sys.argv[1]), most_connections=int(sys.argv[2])), Address("127.0.0.1", 0, None))
"""


class Server:
    """A server whose requests for ``/slow`` wait until they are released."""

    def __init__(self, process):
        self.process = process
        self.port = int(process.stdout.readline().rpartition(":")[2])

    def wait_for_slow(self, count):
        """Wait until this number of requests is running."""
        for _ in range(count):
            assert self.process.stdout.readline() == "at work\n"

    def release(self):
        self.process.send_signal(signal.SIGUSR1)


@pytest.fixture
def start(tmp_path):
    """Start servers with these limits."""
    running = []

    def started(head_s, most):
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(head_s), str(most)],
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "log").open("w"),
            text=True,
            cwd=ROOT,
            env=os.environ,
        )
        running.append(process)
        assert process.stdout is not None
        return Server(process)

    yield started
    for process in running:
        process.terminate()
        process.wait(60)
        process.stdout.close()
    assert "Traceback" not in (tmp_path / "log").read_text()


GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
OK = b'{"status":"ok"}'
SLOW = b'{"status":"slow"}'


def connected(port, sent=b""):
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(sent)
    return connection


def up_to(connection, end):
    """Read until ``end``."""
    answer = b""
    while end not in answer:
        answer += connection.recv(65536)


def received(connection):
    """Return everything until the server closes the connection."""
    with connection:
        pieces = []
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def refusal(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    return int(head.split()[1]), json.loads(body)["error"]


def healthy(port):
    return httpx.get(f"http://127.0.0.1:{port}/health", timeout=60, trust_env=False).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHo"])
def test_a_head_that_does_not_come_is_answered_and_closed(start, begun):
    port = start(2, 100).port
    began = time.monotonic()
    connection = connected(port, begun)
    assert refusal(received(connection)) == (408, "the head of the request did not arrive within 2 s")
    assert time.monotonic() - began >= 2
    assert healthy(port)


@pytest.mark.slow
def test_a_second_head_on_a_connection_is_bounded_too_however_slowly_it_comes(start):
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection = connected(start(2, 100).port, head)
    up_to(connection, OK)
    time.sleep(2.2)  # a connection may be idle between requests
    connection.sendall(head)
    up_to(connection, OK)
    for letter in b"GET":
        connection.sendall(bytes([letter]))
        time.sleep(0.1)
    assert refusal(received(connection))[0] == 408


def test_a_body_that_nobody_reads_does_not_keep_a_connection(start):
    request = b"PUT /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nab"
    connection = connected(start(2, 100).port, request)
    up_to(connection, b"Method Not Allowed")
    connection.sendall(b"c")
    assert b" 408 " in received(connection)


@pytest.mark.slow
def test_a_request_at_work_is_not_held_to_the_time_for_heads(start):
    server = start(2, 100)
    connection = connected(server.port, GET % b"/slow")
    server.wait_for_slow(1)
    time.sleep(2.2)
    server.release()
    assert SLOW in received(connection)


def test_connections_that_ask_nothing_keep_nobody_out(start):
    port = start(600, 20).port
    idle = [connected(port, b"GET /he") for _ in range(60)]
    assert healthy(port)
    open_still = 0
    for connection in idle:
        connection.setblocking(False)
        try:
            open_still += connection.recv(10) != b""
        except BlockingIOError:
            open_still += 1
        except ConnectionResetError:
            pass
        connection.close()
    assert open_still in (19, 20)


@pytest.mark.slow
def test_when_all_are_at_work_a_further_one_is_refused(start):
    server = start(600, 20)
    slow = [connected(server.port, GET % b"/slow") for _ in range(20)]
    server.wait_for_slow(20)
    assert refusal(received(connected(server.port))) == (503, "too many connections")
    server.release()
    assert all(SLOW in received(connection) for connection in slow)
    assert healthy(server.port)


def test_what_is_no_http_is_refused_in_the_form_of_all_errors(start):
    assert refusal(received(connected(start(600, 20).port, b"hello\r\n\r\n"))) == (
        400,
        "Invalid HTTP request received",
    )
