"""Our tools over MCP, with a real MCP client and plain HTTP."""

import httpx
import pytest
from tool_entries import opened
from tool_server import ToolServer, running

pytest.importorskip("mcp")

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


@pytest.fixture
def mcp_server_url(tmp_path):
    """Start servers for a tools file; return their addresses."""
    with running(ToolServer, tmp_path) as start:
        yield lambda tools, **variables: start("mcp", "--http", "--tools", tools, **variables).url


async def use(client):
    (tool,) = (await client.list_tools()).tools
    assert (tool.name, tool.description) == ("code", "Runs a program.")
    assert tool.input_schema["required"] == ["code"]
    result = await client.call_tool("code", PROGRAM)
    assert (result.content[0].text, result.is_error) == ("42", False)
    assert (await client.call_tool("code", {})).is_error
    other = await client.call_tool("cod", PROGRAM)
    assert "expected one of: code" in other.content[0].text


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
    async with httpx.AsyncClient(timeout=60) as plain:
        assert (await plain.post(f"{url}/mcp", json={})).status_code == 401
        assert (await plain.get(f"{url}/health")).json() == {"status": "ok", "running": 0, "waiting": 0}
        assert (await plain.get(f"{url}/metrics")).status_code == 401
        key = {"Authorization": "Bearer s3cret-token"}
        assert (await plain.post(f"{url}/mcp", json=CALL, headers=ACCEPT | key)).status_code == 200
        stream = await plain.get(f"{url}/mcp", headers={"Accept": "text/event-stream"} | key)
        assert (stream.status_code, stream.headers["Allow"]) == (405, "POST")
        numbers = (await plain.get(f"{url}/metrics", headers=key)).text
    assert 'afm_mcp_requests_total{outcome="ok"}' in numbers


async def test_an_agents_tool_can_come_from_it(tools_file, mcp_server_url):
    tool = opened("mcp.McpTool", "code", url=f"{mcp_server_url(tools_file)}/mcp", argument="code")
    assert (await tool.call(PROGRAM["code"])).text == "42"
    await tool.close()
