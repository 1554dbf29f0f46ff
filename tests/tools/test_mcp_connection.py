"""One connection and many calls: what goes wrong in one of them is no other's trouble. Servers are real processes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import mcp_program
import pytest
from tool_entries import entry

from afm.tools import load_tools

pytest.importorskip("mcp")

SERVER = """
import asyncio, os, signal, sys, threading
from mcp import MCPError
from mcp.server import MCPServer
from mcp_types import METHOD_NOT_FOUND, RequestParams

server = MCPServer("bed")
given_up = []

@server.tool()
def process(text: str) -> str:
    return str(os.getpid())

@server.tool()
async def nap(text: str) -> str:
    try:
        await asyncio.sleep(float(text))
    except asyncio.CancelledError:
        given_up.append(text)
        raise
    return "rested"

@server.tool()
def naps_given_up(text: str) -> str:
    return str(given_up.count(text))

@server.tool()
def freeze(text: str) -> str:
    # To this thread: one that is sent to the process may let this thread answer before all have stopped.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    return "thawed"

@server.tool()
def refuse(text: str) -> str:
    raise MCPError(int(text), "not today")

@server.tool()
def lie(text: str) -> int:
    return text

async def unknown(*_):
    raise MCPError(METHOD_NOT_FOUND, "Method not found")

if "old" in sys.argv:  # speaks the protocol of 2025, whose sessions the server remembers
    server._lowlevel_server.add_request_handler("server/discover", RequestParams, unknown)
if sys.argv[1].isdecimal():
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""
NAMES = ("process", "nap", "naps_given_up", "freeze", "refuse", "lie")


class StdioServer:
    """Lives and dies with its client's sessions."""

    def __init__(self, program, *words):
        self.where = {"command": [sys.executable, str(program), "stdio", *words]}

    def thaw(self):
        """A client that gave it up has started another one."""

    def revive(self):
        """Likewise."""


class HttpServer:
    def __init__(self, program, *words):
        self._log = program.with_name("log")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.where = {"url": f"http://127.0.0.1:{self._port}/mcp"}
        self._command = [sys.executable, str(program), str(self._port), *words]
        self.revive()

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)

    def revive(self):
        with self._log.open("w") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        for _ in range(600):
            if "Uvicorn running" in self._log.read_text():
                return
            time.sleep(0.1)
        self.end()
        raise AssertionError(self._log.read_text())

    def end(self):
        self.process.kill()
        self.process.wait(10)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "a server.py"
    path.write_text(SERVER, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def plain():
    return StdioServer(mcp_program.__file__)


@pytest.fixture(scope="module", params=["stdio", "http", "http old"])
def server(request, program):
    kind, *words = request.param.split()
    if kind == "stdio":
        yield StdioServer(program, *words)
        return
    server = HttpServer(program, *words)
    yield server
    server.end()


def entries(server, timeout_s):
    config = {**server.where, "argument": "text", "timeout_s": timeout_s}
    return [entry("mcp.McpTool", name, **config) for name in NAMES]


@pytest.fixture
async def open_tools():
    """Tools of a server."""
    opened = []

    def of(server, timeout_s):
        opened.append(load_tools({"tools": entries(server, timeout_s)}))
        return opened[-1]

    yield of
    for tools in opened:
        await asyncio.gather(*(tool.close() for tool in tools.values()))


async def process(tools):
    result = await tools["process"].call("")
    assert result.ok, result.text
    return int(result.text)


@pytest.mark.slow
async def test_slow_cancelled_and_refused_calls_disturb_no_other(server, open_tools):
    tools = open_tools(server, 3.0)
    before = await process(tools)
    slow = [asyncio.create_task(tools["nap"].call("120")) for _ in range(3)]
    resting = asyncio.create_task(tools["nap"].call("0.5"))
    cancelled = asyncio.create_task(tools["nap"].call("60"))
    await tools["nap"].call("0")  # the server has begun the calls before it
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert cancelled.cancelled()
    for code in (-32602, -32603, -32001, 7):
        assert "not today" in (await tools["refuse"].call(str(code))).text
    await tools["lie"].call("no number")
    assert (await resting).text == "rested"
    answers = []
    while not all(call.done() for call in slow):
        answers += await asyncio.gather(*(process(tools) for _ in range(3)), asyncio.sleep(0.2, before))
    assert {(call.result().ok, call.result().text) for call in slow} == {
        (False, "The tool nap gave no answer within 3 s.")
    }
    assert set(answers) == {before}
    assert await process(tools) == before
    for _ in range(100):  # the server learns of each in a message of its own
        if (given_up := (await tools["naps_given_up"].call("120")).text) == "3":
            break
    assert given_up == "3"


@pytest.mark.slow
async def test_a_server_that_hangs_costs_each_call_its_time_and_one_that_is_killed_works_again(
    server, plain, open_tools
):
    server = server if "url" in server.where else plain
    tools = open_tools(server, 2.0)
    before = await process(tools)
    began = time.monotonic()
    results = await asyncio.gather(tools["freeze"].call(""), *(tools["nap"].call("0") for _ in range(4)))
    results += await asyncio.gather(*(tools["nap"].call("0") for _ in range(4)))
    assert time.monotonic() - began < 30
    assert not results[0].ok
    server.thaw()
    for _ in range(100):
        if (last := await tools["process"].call("")).ok:
            break
    assert (int(last.text) == before) == ("url" in server.where)

    naps = [asyncio.create_task(tools["nap"].call("50")) for _ in range(3)]
    assert (await tools["nap"].call("0")).ok
    began = time.monotonic()
    os.kill(int(last.text), signal.SIGKILL)
    assert {result.ok for result in await asyncio.gather(*naps)} == {False}
    assert time.monotonic() - began < 20
    await asyncio.to_thread(server.revive)
    tries = [await tools["process"].call("") for _ in range(2)]
    assert tries[1].ok, [result.text for result in tries]
    assert int(tries[1].text) != int(last.text)


@pytest.mark.slow
async def test_a_call_that_gives_up_late_leaves_only_the_session_it_used(plain, open_tools):
    tools = open_tools(plain, 4.0)
    before = await process(tools)
    frozen = asyncio.create_task(tools["freeze"].call(""))
    await asyncio.sleep(1.5)
    late = asyncio.create_task(tools["nap"].call("0"))
    assert not (await frozen).ok
    resting = asyncio.create_task(tools["nap"].call("2.2"))
    assert not (await late).ok
    assert (await resting).text == "rested"
    after = await process(tools)
    assert after != before
    await asyncio.gather(*(tool.close() for tool in tools.values()))
    for number in (before, after):
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
