"""Our tools as a real MCP client and plain HTTP see them."""

import asyncio
import socket
import sys

import httpx
import pytest
from loopback import LoopbackServer

from tool_servers.shared.command import ServerSettings

pytest.importorskip("mcp")
from tool_servers.mcp import http_app, mcp_server

pytestmark = pytest.mark.sandbox

TOOLS = """
tools:
  - class_name: afm.tools.code.CodeTool
    tool_schema:
      function:
        name: code
        description: Runs a program.
        parameters: {type: object, properties: {code: {type: string}}, required: [code]}
"""
PROGRAM = {"code": "```py\nprint(6 * 7)\n```"}
CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "code", "arguments": PROGRAM}}
ACCEPT = {"Accept": "application/json, text/event-stream"}


@pytest.fixture
def tools_file(tmp_path):
    path = tmp_path / "the tools.yaml"
    path.write_text(TOOLS, encoding="utf-8")
    return path


async def use(client):
    (tool,) = (await client.list_tools()).tools
    assert (tool.name, tool.description) == ("code", "Runs a program.")
    assert tool.input_schema["required"] == ["code"]
    result = await client.call_tool("code", PROGRAM)
    assert (result.content[0].text, result.is_error) == ("42", False)
    assert (await client.call_tool("code", {})).is_error
    other = await client.call_tool("cod", PROGRAM)
    assert "expected one of: code" in other.content[0].text


async def test_on_standard_streams(tools_file):
    from mcp import Client, StdioServerParameters

    words = ["-m", "tool_servers", "mcp", "--tools", str(tools_file)]
    async with Client(StdioServerParameters(command=sys.executable, args=words)) as client:
        await use(client)


async def test_over_http_with_a_token(tools_file, mcp_server_url):
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    url = mcp_server_url(tools_file, MCP_SERVER_TOKEN="s3cret-token")
    async with (
        create_mcp_http_client(headers={"Authorization": "Bearer s3cret-token"}) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
    ):
        await use(client)
    async with httpx.AsyncClient() as plain:
        assert (await plain.post(f"{url}/mcp", json={})).status_code == 401
        assert (await plain.get(f"{url}/health")).json() == {"status": "ok", "running": 0, "waiting": 0}
        assert (await plain.get(f"{url}/metrics")).status_code == 401
        wrong = {"Authorization": "Bearer s3cret-tokem"}
        assert (await plain.post(f"{url}/mcp", json={}, headers=wrong)).status_code == 401


def announced(url, size):
    """The answer to a request that promises a body of this size and sends one byte of it."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    head = f"POST /mcp HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n{{"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode())
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
    return answer.decode()


async def test_it_counts_what_it_answers_and_refuses_what_it_does_not_serve(tools_file, mcp_server_url):
    url = mcp_server_url(tools_file)
    async with httpx.AsyncClient(timeout=20) as plain:
        assert (await plain.post(f"{url}/mcp", json=CALL, headers=ACCEPT)).status_code == 200
        stream = await plain.get(f"{url}/mcp", headers={"Accept": "text/event-stream"})
        assert (stream.status_code, stream.headers["Allow"]) == (405, "POST")
        assert stream.json() == {"error": "GET /mcp: Method Not Allowed", "kind": "request"}
        assert (await plain.get(f"{url}/other")).json() == {
            "error": "GET /other: Not Found",
            "kind": "request",
        }
        assert "longer than 4194304 bytes" in await asyncio.to_thread(announced, url, 5 << 20)
        numbers = (await plain.get(f"{url}/metrics")).text
    for line in ('{outcome="ok"} 1', '{outcome="request"} 2', '{outcome="too_large"} 1'):
        assert f"afm_mcp_requests_total{line}" in numbers
    assert "afm_mcp_request_seconds_count 1" in numbers
    assert "afm_mcp_running 0" in numbers


async def test_calls_beyond_its_places_are_answered_429_and_counted(tools_file):
    server, tools = mcp_server(tools_file)
    limits = ServerSettings(max_parallel=1, max_waiting=1)
    served = LoopbackServer(http_app(server, tools, token=None, limits=limits)).start()
    async with httpx.AsyncClient(timeout=60) as plain:
        calls = (plain.post(f"{served.origin}/mcp", json=CALL, headers=ACCEPT) for _ in range(8))
        answers = await asyncio.gather(*calls)
        numbers = (await plain.get(f"{served.origin}/metrics")).text
    await asyncio.to_thread(served.stop)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) >= 1
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
    assert f'afm_mcp_requests_total{{outcome="busy"}} {len(refused)}' in numbers
    for answer in answers:
        assert answer in refused or answer.json()["result"]["content"][0]["text"] == "42"


async def test_a_page_cannot_reach_it_by_another_name(tools_file, mcp_server_url):
    url = mcp_server_url(tools_file)
    headers = {"Host": "evil.example", "Accept": "application/json, text/event-stream"}
    async with httpx.AsyncClient() as plain:
        answer = await plain.post(
            f"{url}/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "ping"}, headers=headers
        )
    assert answer.status_code == 421


async def test_an_agents_tool_can_come_from_it(tools_file, mcp_server_url):
    from afm.tools import load_tools

    config = {"url": f"{mcp_server_url(tools_file)}/mcp", "argument": "code"}
    entry = {
        "class_name": "afm.tools.mcp.McpTool",
        "config": config,
        "tool_schema": {"function": {"name": "code"}},
    }
    tool = load_tools({"tools": [entry]})["code"]
    assert (await tool.call(PROGRAM["code"])).text == "42"
    await tool.close()
