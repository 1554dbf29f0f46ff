"""Tools of real MCP servers: a program on its standard streams, and one behind HTTP."""

import asyncio
import os
import socket
import subprocess
import sys
import time

import pytest

from afm.errors import ConfigError
from afm.tools import load_tools

pytest.importorskip("mcp")

SERVER = """
import os, sys, time
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

@server.tool()
def die(text: str) -> str:
    os._exit(3)

@server.tool()
def sleep(text: str) -> str:
    time.sleep(30)
    return "late"

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "a server.py"
    path.write_text(SERVER, encoding="utf-8")
    return path


def entry(name, where, **config):
    return {
        "class_name": "afm.tools.mcp.McpTool",
        "config": {**where, **config},
        "tool_schema": {"function": {"name": name}},
    }


def stdio(program):
    return {"command": [sys.executable, str(program)]}


async def close(tools):
    await asyncio.gather(*(tool.close() for tool in tools.values()))


async def test_a_programs_tools_are_an_agents_tools(program):
    tools = load_tools(
        {
            "tools": [
                entry("add", stdio(program)),
                entry("loud", stdio(program), tool="shout", argument="text"),
            ]
        }
    )
    assert (await tools["add"].call('{"a": 2, "b": 40}')).text == "42"
    result = await tools["loud"].call("\n hello </observation> \n")
    assert (result.text, result.ok, result.meta) == ("HELLO </OBSERVATION>", True, {"error": False})
    assert "no JSON object" in (await tools["add"].call("[1]")).text
    assert "no JSON:" in (await tools["add"].call("2+2")).text
    assert "no JSON:" in (await tools["add"].call("[" * 200_000)).text
    await close(tools)


async def test_the_tools_own_errors_are_answers(program):
    tools = load_tools(
        {"tools": [entry("fail", stdio(program), argument="text"), entry("add", stdio(program))]}
    )
    result = await tools["fail"].call("way")
    assert result.ok
    assert result.meta["error"]
    assert "fail" in result.text
    assert (await tools["add"].call('{"a": "x"}')).meta["error"]
    await close(tools)


async def test_entries_of_one_server_share_its_process_and_their_environment(program, monkeypatch):
    monkeypatch.setenv("GIVEN", "yes")
    monkeypatch.setenv("KEPT", "secret")
    where = {**stdio(program), "environment": ["GIVEN"]}
    entries = [entry(name, where, tool="process", argument="text") for name in ("one", "two")]
    tools = load_tools({"tools": entries})
    first, second = [(await tools[name].call("")).text for name in ("one", "two")]
    assert first == second
    assert first.split()[1:] == ["yes", "None"]
    await close(tools)


async def test_a_server_that_dies_fails_one_call_and_is_started_again(program):
    tools = load_tools(
        {"tools": [entry("die", stdio(program), argument="text"), entry("add", stdio(program))]}
    )
    result = await tools["die"].call("")
    assert not result.ok
    assert "die failed" in result.text
    assert (await tools["add"].call('{"a": 1, "b": 1}')).text == "2"
    await close(tools)


async def test_a_server_that_hangs_is_given_up(program):
    tools = load_tools({"tools": [entry("sleep", stdio(program), argument="text", timeout_s=3.0)]})
    begun = time.monotonic()
    result = await tools["sleep"].call("")
    assert (result.ok, result.text) == (False, "The tool sleep gave no answer within 3 s.")
    assert time.monotonic() - begun < 20
    await close(tools)


async def test_a_missing_program_is_a_failed_tool():
    tools = load_tools({"tools": [entry("x", {"command": ["/no/such/program"]}, argument="text")]})
    result = await tools["x"].call("")
    assert not result.ok
    assert "x failed" in result.text


async def test_a_server_behind_http(program):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"
    tools = load_tools({"tools": [entry("add", {"url": url})]})
    assert not (await tools["add"].call('{"a": 1, "b": 1}')).ok
    server = subprocess.Popen(  # noqa: ASYNC220 - it only starts
        [sys.executable, str(program), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(100):
            if (result := await tools["add"].call('{"a": 1, "b": 1}')).ok:
                break
            await asyncio.sleep(0.2)
        assert result.text == "2"
        await close(tools)
    finally:
        server.kill()
        server.wait()


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
