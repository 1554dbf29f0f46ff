"""A tool that keeps its caller waiting is reported, in an episode and in a team's work."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from afm.datasets import Task
from afm.distill.event_log import Recorder
from afm.endpoints.budget import Spent
from afm.rollout.tool_calls import ToolCaller
from afm.tools import ToolResult, base
from afm.tools.base import SlowCalls
from afm.trajectory.tags import Step


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.queue: SimpleQueue[str] = SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.queue.put(record.getMessage())


@pytest.fixture
def messages() -> Iterator[SimpleQueue[str]]:
    handler = Messages()
    base._LOG.addHandler(handler)
    yield handler.queue
    base._LOG.removeHandler(handler)


class BlockingTool:
    """Blocks the event loop, as a client without `await` does, until it has been reported."""

    name = "code"

    def __init__(self, messages: SimpleQueue[str]) -> None:
        self.messages = messages

    async def call(self, argument: str) -> ToolResult:
        return ToolResult(self.messages.get(timeout=60))

    async def close(self) -> None: ...


class NoLog:
    spent = Spent()

    def write(self, event: object) -> None: ...


async def by_episode(tool: BlockingTool) -> str:
    caller = ToolCaller({"code": tool}, run_repeated=True)
    record, _ = await caller.call(Step("code", "1"), None)
    return record.observation


async def by_team(tool: BlockingTool) -> str:
    recorder = Recorder(NoLog(), Task(id="q", question="?"), 0, {"code": tool}, attempt=1)
    return (await recorder.use("coder", "code", "1")).text


@pytest.mark.parametrize("way", [by_episode, by_team])
async def test_a_tool_that_blocks_is_reported_while_it_does(way, messages, monkeypatch) -> None:
    monkeypatch.setattr(base, "_SLOW_CALLS", SlowCalls(patience_s=0.01))
    assert await way(BlockingTool(messages)) == "waiting for the tool 'code' (0 s)"


def test_a_tool_is_reported_again_when_the_wait_has_doubled() -> None:
    calls = SlowCalls(patience_s=30)
    with calls.watching("search"):
        begun = time.monotonic()
        assert calls._overdue(begun + 29) == []
        assert calls._overdue(begun + 45) == ["waiting for the tool 'search' (45 s)"]
        assert calls._overdue(begun + 80) == []
        with calls.watching("search"), calls.watching("code"):
            assert calls._overdue(begun + 91) == [
                "waiting for the tool 'search' (91 s, 2 calls)",
                "waiting for the tool 'code' (91 s)",
            ]
    assert calls._overdue(begun + 1000) == []
