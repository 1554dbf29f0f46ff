"""Tools of a real MCP server; what befalls connections is in test_mcp_connection.py."""

import asyncio
import sys

import pytest
from tool_entries import entry, opened

from afm.errors import ConfigError
from afm.tools import load_tools

pytest.importorskip("mcp")

MCP = "mcp.McpTool"
SERVER = """
import os
from mcp.server import MCPServer

server = MCPServer("calculator")

@server.tool()
def add(a: int, b: int) -> str:
    return str(a + b)

@server.tool()
def shout(text: str) -> str:
    return text.upper()

@server.tool()
def fail(text: str) -> str:
    raise ValueError("no " + text)

@server.tool()
def process(text: str) -> str:
    return f"{os.getpid()} {os.environ.get('GIVEN')} {os.environ.get('KEPT')}"

server.run("stdio")
"""


@pytest.mark.slow
async def test_a_servers_tools_are_an_agents_tools(tmp_path, monkeypatch):
    monkeypatch.setenv("GIVEN", "yes")
    monkeypatch.setenv("KEPT", "secret")
    program = tmp_path / "a server.py"
    program.write_text(SERVER, encoding="utf-8")

    def of(name, **config):
        return entry(MCP, name, command=[sys.executable, str(program)], environment=["GIVEN"], **config)

    entries = [of("add"), of("loud", tool="shout", argument="text"), of("fail", argument="text")]
    entries += [of(name, tool="process", argument="text") for name in ("left", "right")]
    tools = load_tools({"tools": entries})
    assert (await tools["add"].call('{"a": 2, "b": 40}')).text == "42"
    result = await tools["loud"].call("\n hello </observation> \n")
    assert (result.text, result.ok, result.meta) == ("HELLO </OBSERVATION>", True, {"error": False})
    for argument, message in (
        ("[1]", "not a JSON object"),
        ("2+2", "not JSON:"),
        ("[" * 200_000, "not JSON:"),
    ):
        assert message in (await tools["add"].call(argument)).text

    result = await tools["fail"].call("way")  # the tool's own error is an answer
    assert (result.ok, bool(result.meta["error"])) == (True, True)
    assert "fail" in result.text
    assert (await tools["add"].call('{"a": "x"}')).meta["error"]

    left, right = [(await tools[name].call("")).text for name in ("left", "right")]
    assert left == right  # one process, with no more of the environment than it was given
    assert left.split()[1:] == ["yes", "None"]
    await asyncio.gather(*(tool.close() for tool in tools.values()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"command": ["/no/such/program"]}, "x failed"),
        (
            {"url": "http://127.0.0.1:9/mcp", "token_variable": "TOKEN_FOR_TEST"},
            "environment variable TOKEN_FOR_TEST is not set",
        ),
        (
            {"url": "http://me:pass@127.0.0.1:9/mcp", "token_variable": "TOKEN_FOR_TEST"},
            "http://***@127.0.0.1:9",
        ),
        ({"url": "http://127.0.0.1:9/mcp", "token_variable": "A_TOKEN"}, "A_TOKEN: expected printable ASCII"),
    ],
)
async def test_a_missing_program_and_a_missing_token_are_failures_of_the_tool(config, message, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "pass\n")
    result = await opened(MCP, "x", argument="text", **config).call("")
    assert not result.ok
    assert message in result.text
    assert "pass" not in result.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "either `command`"),
        ({"command": ["x"], "url": "http://x"}, "either `command`"),
        ({"url": "ftp://x"}, "config.url: got 'ftp://x'"),
    ],
)
def test_wrong_settings_are_explained(config, message):
    with pytest.raises(ConfigError, match=message):
        opened(MCP, "x", **config)
