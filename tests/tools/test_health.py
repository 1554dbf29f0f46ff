from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from site_server import Site
from tool_entries import entry

from afm.tools import load_tools
from afm.tools.health import loopback_findings, tool_findings, tool_troubles, unanswered


@pytest.fixture
def server() -> Iterator[str]:
    """A server that knows no /health, like the ones of others."""
    site = Site()
    yield site.url
    site.close()


NOBODY = "http://127.0.0.1:9"


def tools(*entries: dict[str, Any]) -> list[Any]:
    return list(load_tools({"tools": entries}).values())


async def test_tools_whose_servers_are_silent_are_told_with_the_address(server: str) -> None:
    wiki = "search.WikiSearchTool"
    troubles = await tool_troubles(
        tools(
            entry(wiki, "well", urls=[f"{server}/retrieve"]),
            entry(wiki, "unwell", urls=[server, f"{NOBODY}/retrieve"]),
            entry("code.CodeTool", "remote", urls=[NOBODY]),
        )
    )
    assert set(troubles) == {"unwell", "remote"}
    assert troubles["unwell"].startswith(f"no server answers at {NOBODY} (ConnectError")
    assert server not in troubles["unwell"]
    assert troubles["remote"].startswith(f"no server answers at {NOBODY}")


def test_the_advice_starts_the_server_that_is_silent() -> None:
    declared = [entry("search.WikiSearchTool", name, urls=[NOBODY]) for name in ("wiki_search", "mine")]
    mine, wiki = tool_findings(load_tools({"tools": declared}))
    assert wiki.next_step == "start it: tool_servers/servers.sh start wiki_search"
    assert mine.next_step == "start it (docs/tools.md)"


@pytest.mark.sandbox
async def test_the_sandbox_of_this_machine_runs_a_program() -> None:
    assert await tool_troubles(tools(entry("code.CodeTool", "code"))) == {}
    broken = entry("code.CodeTool", "code", sandbox={"python": "/nowhere/python3"})
    assert "/nowhere/python3" in (await tool_troubles(tools(broken)))["code"]


async def test_an_answer_of_any_kind_is_one(server: str) -> None:
    assert await unanswered(f"{server}/v1") is None
    assert await unanswered("http://[") is not None


def test_a_server_on_the_loopback_is_a_warning_on_several_nodes() -> None:
    wiki = "search.WikiSearchTool"
    declared = [
        entry(wiki, "near", urls=["http://localhost:8000/retrieve", "http://10.0.0.1:8000/retrieve"]),
        entry(wiki, "far", urls=["http://10.0.0.1:8000/retrieve"]),
    ]
    called = load_tools({"tools": declared})
    [finding] = loopback_findings(called, 8)
    assert finding.subject == "addresses"  # `afm reproduce` stops at a warning about tools
    assert finding.text.startswith(
        "near: http://localhost:8000 is another server on each of the 8 nodes; set an"
    )
    assert list(loopback_findings(called, 1)) == []
    _, judge = loopback_findings(called, 2, [None, "http://127.0.0.1:8001/v1"])
    assert judge.text.startswith(
        "judge: http://127.0.0.1:8001/v1 is another server on each of the 2 nodes; set an"
    )
    assert len(list(loopback_findings(called, 2, ["http://10.0.0.1:8001/v1"]))) == 1
