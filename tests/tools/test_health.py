from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from site_server import Site
from tool_entries import entry

from afm.tools import load_tools
from afm.tools.health import tool_troubles, unanswered


@pytest.fixture
def server() -> Iterator[str]:
    """A server that knows no /health, like the ones of others."""
    site = Site()
    yield site.url
    site.close()


@pytest.fixture
def nobody() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def tools(*entries: dict[str, Any]) -> list[Any]:
    return list(load_tools({"tools": entries}).values())


async def test_tools_whose_servers_are_silent_are_told_with_the_address(server: str, nobody: str) -> None:
    wiki = "wiki_search.WikiSearchTool"
    troubles = await tool_troubles(
        tools(
            entry(wiki, "well", urls=[f"{server}/retrieve"]),
            entry(wiki, "unwell", urls=[server, f"{nobody}/retrieve"]),
            entry("code.CodeTool", "remote", urls=[nobody]),
        )
    )
    assert set(troubles) == {"unwell", "remote"}
    assert troubles["unwell"].startswith(f"no server answers at {nobody} (ConnectError")
    assert server not in troubles["unwell"]
    assert troubles["remote"].startswith(f"no server answers at {nobody}")


@pytest.mark.sandbox
async def test_the_sandbox_of_this_machine_runs_a_program() -> None:
    assert await tool_troubles(tools(entry("code.CodeTool", "code"))) == {}
    broken = entry("code.CodeTool", "code", sandbox={"python": "/nowhere/python3"})
    assert "/nowhere/python3" in (await tool_troubles(tools(broken)))["code"]


async def test_an_answer_of_any_kind_is_one(server: str) -> None:
    assert await unanswered(f"{server}/v1") is None
    assert await unanswered("http://[") is not None
