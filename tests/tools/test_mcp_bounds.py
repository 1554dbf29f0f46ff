"""What a hostile MCP server sends is never held beyond the bound. Servers are real processes and real sockets."""

import asyncio
import gzip
import json
import sys
from contextlib import suppress

import mcp_program
import psutil
import pytest
from mcp_program import protocol_answer
from site_server import Site
from tool_entries import opened

pytest.importorskip("mcp")

MIB = 1 << 20


@pytest.fixture
async def tool():
    """A tool of a server, by the server's settings; closed at the end."""
    tools = []

    def of(**config):
        config = {"argument": "text", "timeout_s": 30, "max_bytes": MIB, **config}
        tools.append(opened("mcp.McpTool", "repeat", **config))
        return tools[-1]

    yield of
    for each in tools:
        await each.close()


@pytest.fixture
def hostile():
    """Sets up a server that speaks just enough of the protocol and answers calls by a function of the handler."""
    site = Site()

    def of(sent):
        def answer(handler):
            if not handler.body:
                return 405, "text/plain", b""
            request = json.loads(handler.body)
            handler.asked = request.get("id")
            if request["method"] == "tools/call":
                site.codings = [handler.headers["Accept-Encoding"]]
                handler.close_connection = True
                return sent(handler)
            if "id" not in request:
                return 202, "application/json", b""
            said = {"jsonrpc": "2.0", "id": handler.asked, **protocol_answer(request)}
            return 200, "application/json", json.dumps(said).encode()

        site.pages["/mcp"] = answer
        return site, f"{site.url}/mcp"

    yield of
    site.close()


def headers(handler, kind, coding=None):
    handler.send_response(200)
    handler.send_header("Content-Type", kind)
    if coding:
        handler.send_header("Content-Encoding", coding)
    handler.end_headers()


def endless(kind, start=b""):
    def send(handler):
        headers(handler, kind)
        handler.wfile.write(start)
        with suppress(OSError):
            for _ in range(16 * 1024):  # 1 GiB
                handler.wfile.write(b"x" * 65536)

    return send


def bomb(kind):
    """256 MiB of blanks, as one gzip body of many members."""

    def send(handler):
        headers(handler, kind, "gzip")
        handler.wfile.write(gzip.compress(b" " * MIB) * 256)

    return send


async def given_up(call):
    """The text of a call that must fail before its time is over, while this process hardly grows."""
    process = psutil.Process()
    before = highest = process.memory_info().rss
    task = asyncio.ensure_future(call)
    while not task.done():
        await asyncio.wait([task], timeout=0.05)
        highest = max(highest, process.memory_info().rss)
    assert highest - before < 64 * MIB
    assert not task.result().ok
    assert "30 s" not in task.result().text
    return task.result().text


async def test_a_long_answer_fails_its_call_and_the_program_is_started_again(tool):
    repeat = tool(command=[sys.executable, mcp_program.__file__])
    assert (await repeat.call("1000")).text == "x" * 1000
    refused = await repeat.call(str(2 * MIB))
    assert not refused.ok
    assert "x" * 100 not in refused.text
    assert (await repeat.call("1000")).ok


async def test_a_line_that_never_ends_is_given_up(tool):
    await given_up(tool(command=[sys.executable, mcp_program.__file__]).call("for ever"))


@pytest.mark.parametrize(
    ("kind", "start", "message"),
    [
        ("application/json", b"", f"larger than {MIB} bytes"),
        ("text/event-stream", b"event: message\ndata: ", ""),
        ("text/html", b"<p>", ""),
    ],
)
async def test_a_body_that_never_ends_is_given_up(tool, hostile, kind, start, message):
    server, url = hostile(endless(kind, start))
    assert message in await given_up(tool(url=url).call("1"))
    assert server.codings == ["identity"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("application/json", "compressed"),
        ("text/event-stream", ""),
    ],  # the client does not tell why a stream failed
)
async def test_a_compressed_body_is_refused_unread(tool, hostile, kind, message):
    _, url = hostile(bomb(kind))
    assert message in await given_up(tool(url=url).call("1"))


def packed_events(handler):
    """A sound answer as an event, packed although nobody asked for that."""
    headers(handler, "text/event-stream", "gzip")
    answer = {"jsonrpc": "2.0", "id": handler.asked, "result": {"content": [{"type": "text", "text": "42"}]}}
    handler.wfile.write(gzip.compress(f"event: message\ndata: {json.dumps(answer)}\n\n".encode()))


async def test_compressed_events_are_refused_however_short(tool, hostile):
    _, url = hostile(packed_events)
    assert not (await tool(url=url).call("1")).ok
