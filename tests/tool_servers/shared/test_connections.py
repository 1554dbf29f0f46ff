"""A real server, with clients that connect and then do not ask."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[3]
SERVER = """
import asyncio, sys
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from tool_servers.shared.command import Address
from tool_servers.shared.serve import ServedApp, serve

async def health(request):
    return JSONResponse({"status": "ok"})

async def slow(request):
    await asyncio.sleep(3)
    return JSONResponse({"status": "slow"})

app = Starlette(routes=[Route("/health", health), Route("/slow", slow)])
serve(ServedApp(app, None, 1, head_s=float(sys.argv[1]), most_connections=int(sys.argv[2])), Address("127.0.0.1", 0, None))
"""


@pytest.fixture
def start(tmp_path):
    """Starts a server with these limits and returns its port."""
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
        return int(process.stdout.readline().rpartition(":")[2])

    yield started
    for process in running:
        process.terminate()
        process.wait(20)
        process.stdout.close()
    assert "Traceback" not in (tmp_path / "log").read_text()


GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
OK = b'{"status":"ok"}'
SLOW = b'{"status":"slow"}'


def connected(port, sent=b""):
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(sent)
    return connection


def up_to(connection, end):
    """Reads until this came."""
    answer = b""
    while end not in answer:
        answer += connection.recv(65536)


def told(connection):
    """All that comes until the server closes."""
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
    return httpx.get(f"http://127.0.0.1:{port}/health", timeout=20, trust_env=False).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHo"])
def test_a_head_that_does_not_come_is_answered_and_closed(start, begun):
    port = start(0.5, 100)
    began = time.monotonic()
    connection = connected(port, begun)
    assert refusal(told(connection)) == (408, "the head of the request did not arrive within 0.5 s")
    assert time.monotonic() - began >= 0.5
    assert healthy(port)


@pytest.mark.slow
def test_a_second_head_on_a_connection_is_bounded_too_however_slowly_it_comes(start):
    connection = connected(start(0.5, 100), b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    up_to(connection, OK)
    time.sleep(0.7)  # between requests a connection may rest
    for letter in b"GET":
        connection.sendall(bytes([letter]))
        time.sleep(0.1)
    assert refusal(told(connection))[0] == 408


def test_a_body_that_nobody_reads_does_not_keep_a_connection(start):
    request = b"PUT /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nab"
    connection = connected(start(0.5, 100), request)
    up_to(connection, b"Method Not Allowed")
    connection.sendall(b"c")
    assert b" 408 " in told(connection)


@pytest.mark.slow
def test_a_request_at_work_is_not_held_to_the_time_for_heads(start):
    assert SLOW in told(connected(start(0.5, 100), GET % b"/slow"))


def test_connections_that_ask_nothing_keep_nobody_out(start):
    port = start(60, 20)
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
    port = start(60, 20)
    slow = [connected(port, GET % b"/slow") for _ in range(20)]
    time.sleep(0.5)
    assert refusal(told(connected(port))) == (503, "too many connections")
    assert all(SLOW in told(connection) for connection in slow)
    assert healthy(port)


def test_what_is_no_http_is_refused_in_the_form_of_all_errors(start):
    assert refusal(told(connected(start(60, 20), b"hello\r\n\r\n"))) == (400, "Invalid HTTP request received")
