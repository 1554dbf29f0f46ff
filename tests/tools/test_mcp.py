"""Tools of a real MCP server; what befalls connections is in test_mcp_connection.py."""

import asyncio
import os
import sys

import pytest

from afm.errors import ConfigError
from afm.tools import load_tools

pytest.importorskip("mcp")

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


def entry(name, where, **config):
    return {
        "class_name": "afm.tools.mcp.McpTool",
        "config": {**where, **config},
        "tool_schema": {"function": {"name": name}},
    }


async def test_a_servers_tools_are_an_agents_tools(tmp_path, monkeypatch):
    monkeypatch.setenv("GIVEN", "yes")
    monkeypatch.setenv("KEPT", "secret")
    program = tmp_path / "a server.py"
    program.write_text(SERVER, encoding="utf-8")
    where = {"command": [sys.executable, str(program)], "environment": ["GIVEN"]}
    processes = [entry(name, where, tool="process", argument="text") for name in ("left", "right")]
    loud = entry("loud", where, tool="shout", argument="text")
    tools = load_tools(
        {"tools": [entry("add", where), loud, entry("fail", where, argument="text"), *processes]}
    )
    assert (await tools["add"].call('{"a": 2, "b": 40}')).text == "42"
    result = await tools["loud"].call("\n hello </observation> \n")
    assert (result.text, result.ok, result.meta) == ("HELLO </OBSERVATION>", True, {"error": False})
    assert "no JSON object" in (await tools["add"].call("[1]")).text
    assert "no JSON:" in (await tools["add"].call("2+2")).text
    assert "no JSON:" in (await tools["add"].call("[" * 200_000)).text

    result = await tools["fail"].call("way")  # the tool's own error is an answer
    assert (result.ok, bool(result.meta["error"])) == (True, True)
    assert "fail" in result.text
    assert (await tools["add"].call('{"a": "x"}')).meta["error"]

    left, right = [(await tools[name].call("")).text for name in ("left", "right")]
    assert left == right  # one process, with no more of the environment than it was given
    assert left.split()[1:] == ["yes", "None"]
    await asyncio.gather(*(tool.close() for tool in tools.values()))


async def test_a_missing_program_is_a_failed_tool():
    tools = load_tools({"tools": [entry("x", {"command": ["/no/such/program"]}, argument="text")]})
    result = await tools["x"].call("")
    assert not result.ok
    assert "x failed" in result.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "either `command`"),
        ({"command": ["x"], "url": "http://x"}, "either `command`"),
        ({"url": "ftp://x"}, "config.url: got 'ftp://x'"),
        ({"command": ["x"], "tol": "y"}, r"tol: unknown key; did you mean 'tool'\?"),
    ],
)
def test_wrong_settings_are_explained(config, message):
    with pytest.raises(ConfigError, match=message):
        load_tools({"tools": [entry("x", config)]})


async def test_a_token_comes_from_the_environment_only():
    assert "TOKEN_FOR_TEST" not in os.environ
    where = {"url": "http://127.0.0.1:9/mcp", "token_variable": "TOKEN_FOR_TEST"}
    tools = load_tools({"tools": [entry("x", where, argument="text")]})
    result = await tools["x"].call("")
    assert not result.ok
    assert "environment variable TOKEN_FOR_TEST is not set" in result.text
