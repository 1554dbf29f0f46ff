"""Recorded calls: replayed as they were, never with a secret, whole after any kill."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys

import pytest
from tool_entries import entry

from afm.errors import ConfigError, ReplayError
from afm.tools import ToolResult, load_tools
from afm.tools.base import current_goal, working_toward
from afm.tools.cassette import (
    Cassette,
    CassetteSettings,
    CassetteTool,
    Recorded,
    normalised,
    staleness,
)


class Counter:
    """Answers with the number of its calls."""

    name = "count"

    def __init__(self):
        self.calls = 0

    async def call(self, argument):
        self.calls += 1
        return ToolResult(f"{argument} {self.calls}", ok="down" not in argument, meta={"hits": self.calls})

    async def close(self):
        self.calls = -1


def taped(path, tool=None, version="v1", **settings):
    return CassetteTool(tool or Counter(), Cassette(path), CassetteSettings(file=path, **settings), version)


async def test_a_replay_answers_as_the_recording_did(tmp_path):
    path = tmp_path / "a run/x.cassette"
    live = taped(path, mode="record")
    assert [(await live.call("q")).text for _ in range(2)] == ["q 1", "q 2"]
    await live.close()
    result = await taped(path).call(" q\r\n")
    assert (result.text, result.ok) == ("q 2", True)
    assert result.meta == {"hits": 2, "cassette": "hit", "stale": False}
    assert (await taped(path, version="v2").call("q")).meta["stale"]


async def test_what_a_miss_does_is_a_choice(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(ReplayError, match=r"no recorded call of count with argument 'q'.*on_miss to live"):
        await taped(path).call("q")
    assert (await taped(path, on_miss="empty").call("q")).text == "Nothing was found."
    assert (await taped(path, on_miss="live").call("q")).text == "q 1"
    assert (await taped(path).call("q")).text == "q 1"


class Aimed(Counter):
    """Answers toward the goal of the episode, as the page tool does."""

    def context(self):
        return current_goal()

    async def call(self, argument):
        result = await super().call(argument)
        return ToolResult(f"{result.text} toward {current_goal()}", meta=result.meta)


async def called_toward(tool, goal, argument="q"):
    with working_toward(goal, "I should look."):
        return await tool.call(argument)


async def test_an_answer_toward_one_goal_is_not_replayed_toward_another(tmp_path):
    path = tmp_path / "x"
    live = taped(path, Aimed(), mode="record")
    texts = [(await called_toward(live, goal)).text for goal in ("Who?", "When?", "Who?")]
    assert [text.split()[1] for text in texts] == ["1", "2", "3"]
    played = taped(path, Aimed())
    assert (await called_toward(played, "When?")).text == texts[1]
    who = await called_toward(played, "Who? ")
    assert (who.text, who.meta["stale"]) == (texts[2], False)
    with pytest.raises(
        ReplayError, match=r"argument 'q' with this goal; record it.* or cassette.goal to any"
    ):
        await called_toward(played, "Where?")
    loose = await called_toward(taped(path, Aimed(), goal="any"), "Where?")
    assert (loose.text, loose.meta["stale"]) == (texts[2], True)
    assert (await called_toward(taped(path, Aimed(), goal="any"), "When?")).text == texts[1]


async def test_tools_without_a_goal_do_not_care_for_it(tmp_path):
    path = tmp_path / "x"
    first = await called_toward(taped(path, mode="record"), "Who?")
    second = await called_toward(taped(path), "When?")
    assert (second.text, second.meta["stale"]) == (first.text, False)


def test_a_cassette_of_another_version_is_refused_and_kept(tmp_path):
    with sqlite3.connect(tmp_path / "x") as old:
        old.execute("CREATE TABLE calls (tool TEXT, argument TEXT)")
        old.execute("PRAGMA user_version = 1")
    old.close()
    with pytest.raises(ConfigError, match="a cassette of version 1, expected 2; record it again"):
        Cassette(tmp_path / "x")
    with sqlite3.connect(tmp_path / "x") as kept:
        assert kept.execute("SELECT count(*) FROM calls").fetchone() == (0,)


def started(program, *words):
    """A process with this program."""
    return subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True)


async def test_failures_of_the_infrastructure_are_not_recorded(tmp_path):
    live = taped(tmp_path / "x", mode="record")
    assert not (await live.call("down")).ok
    with pytest.raises(ReplayError):
        await taped(tmp_path / "x").call("down")


async def test_secrets_never_reach_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-very-secret-1")
    path = tmp_path / "x"
    live = taped(path, mode="record")
    assert "sk-very-secret-1" in (await live.call("GET ?key=sk-very-secret-1")).text
    await live.close()
    assert b"very-secret" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert (await taped(path).call("GET ?key=sk-very-secret-1")).text == "GET ?key=[secret] 1"


def test_arguments_differ_only_in_what_a_tool_sees():
    assert normalised("a  \r\nb\n") == "a\nb"
    assert normalised("  a") == "a"
    assert normalised("a\n  b") == "a\n  b"
    assert normalised("e\u0301") == "\u00e9"


async def test_age_is_reported_by_tool(tmp_path):
    cassette = Cassette(tmp_path / "x")
    for number, tool, version in ((1, "a", "v1"), (2, "a", "v2"), (9, "b", "v1")):
        await cassette.add(Recorded(tool, str(number), ToolResult(""), version, float(number)))
    report = staleness(cassette, max_age_s=8.0, now=10.0)
    assert (report["a"].calls, report["a"].outdated, report["a"].versions) == (2, 1, {"v1": 1, "v2": 1})
    assert (report["b"].oldest, report["b"].outdated) == (9.0, 0)


WRITER = """
import asyncio, sys
from pathlib import Path
from afm.tools import ToolResult
from afm.tools.cassette import Cassette, Recorded

async def work():
    cassette = Cassette(Path(sys.argv[1]))
    for number in range(int(sys.argv[3])):
        argument = f"{sys.argv[2]}-{number}"
        await cassette.add(Recorded("t", argument, ToolResult("x" * 5000), "v", 1.0))
        print(argument, flush=True)

asyncio.run(work())
"""


@pytest.mark.slow
def test_several_processes_write_one_cassette(tmp_path):
    writers = [started(WRITER, tmp_path / "x", str(number), "50") for number in range(2)]
    assert [len(writer.communicate()[0].splitlines()) for writer in writers] == [50, 50]
    assert len(list(Cassette(tmp_path / "x").calls())) == 100


def test_a_killed_recorder_loses_nothing_that_it_had_acknowledged(tmp_path):
    with started(WRITER, tmp_path / "x", "0", "1000000") as child:
        seen = [child.stdout.readline() for _ in range(30)]
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read().splitlines(keepends=True)
    acknowledged = {line.strip() for line in seen + rest if line.endswith("\n")}
    assert acknowledged <= {call.argument for call in Cassette(tmp_path / "x").calls()}


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such cassette"):
        Cassette(tmp_path / "none", readonly=True)
    (tmp_path / "text").write_text("hello " * 200)
    with pytest.raises(ConfigError, match="cannot be used as a cassette"):
        Cassette(tmp_path / "text")


ENTRY = entry("code.CodeTool", "code")


@pytest.mark.sandbox
async def test_a_tools_file_puts_its_tools_behind_a_cassette(tmp_path):
    file, texts = str(tmp_path / "x"), []
    for settings in ({"file": file, "mode": "record"}, file):
        tool = load_tools({"tools": [ENTRY], "cassette": settings})["code"]
        texts.append((await tool.call("```py\nimport time; print(time.time_ns())\n```")).text)
        await tool.close()
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match=r"tools configuration: cassette.mode: got 'play'"):
        load_tools({"tools": [ENTRY], "cassette": {"file": file, "mode": "play"}})


def test_the_command_reports_age_and_versions(tmp_path, afm):
    async def fill():
        cassette = Cassette(tmp_path / "x")
        for number in range(3):
            await cassette.add(Recorded("a", str(number), ToolResult(""), f"v{number % 2}", 86_400.0))

    asyncio.run(fill())
    facts = "3 calls from 1970-01-02 to 1970-01-02, 3 older than 30 days, versions of the tool: 2"
    assert afm("cassette", tmp_path / "x").stdout == f"a: {facts}\n"


READER = """
import asyncio, sys
from pathlib import Path
from afm.errors import ConfigError
from afm.tools.cassette import Cassette
for name in ("whole", "killed"):
    try:
        cassette = Cassette(Path(sys.argv[1], name), readonly=True)
        print(len(list(cassette.calls())), asyncio.run(cassette.find("count", "q")).result.text)
    except ConfigError as error:
        print(error)
"""


@pytest.fixture
async def whole(tmp_path):
    live = taped(tmp_path / "whole", mode="record")
    await live.call("q")
    await live.close()


def test_where_nothing_can_be_written_cassettes_are_read_or_say_what_to_do(tmp_path, whole):
    """A folder that is mounted for reading only stops even the superuser."""
    (tmp_path / "killed").touch()
    (tmp_path / "killed-wal").write_bytes(b"calls")
    names = {file.name for file in tmp_path.iterdir()}

    mounted = f"mount --bind '{tmp_path}' '{tmp_path}' && mount -o remount,ro,bind '{tmp_path}'"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mounted], capture_output=True).returncode:
        pytest.skip("needs user and mount namespaces")
    words = ["unshare", "-rm", "sh", "-c", f'{mounted} && exec "$@"', "sh", sys.executable, "-c", READER]
    done = subprocess.run([*words, tmp_path], capture_output=True, text=True)
    read, killed = done.stdout.splitlines()
    assert read == "1 q 1"
    assert "left killed-wal; make the folder writable and run `afm cassette FILE` once" in killed
    assert {file.name for file in tmp_path.iterdir()} == names
