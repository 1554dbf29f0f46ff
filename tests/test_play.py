from typing import Any

import pytest

from afm.agents import load_agent
from afm.datasets import Task
from afm.errors import EngineError, RefusedError
from afm.play import Job, Referee, ToolsDownError, play_once
from afm.trajectory.record import CallRecord, Record, StopReason

TASK = Task(id="1", question="Who?", ground_truth="A", data_source="search")


class Player:
    """Makes records of the calls in ``plays``, or raises what is there."""

    name, keeps_format = "player", True

    def __init__(self, *plays: Any) -> None:
        self.left = list(plays)

    async def play(self, episode: str, task: Task, seed: int) -> Record:
        play = self.left.pop(0)
        if isinstance(play, Exception):
            raise play
        calls = [CallRecord(role="t", tool="t", argument="x", observation="down", ok=ok) for ok in play]
        return Record(
            id=episode,
            agent="web",
            agent_digest="",
            question=task.question,
            segments=(),
            stop=StopReason.ANSWER,
            calls=tuple(calls),
        )


async def test_an_episode_counts_when_one_of_its_calls_was_answered() -> None:
    assert len((await play_once(Player([False, True]), "1#0", TASK, 0)).calls) == 2
    with pytest.raises(ToolsDownError, match=r"every tool call failed.*down"):
        await play_once(Player([False, False]), "1#0", TASK, 0)


async def test_a_refusal_is_final_and_another_failure_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afm.play._LONGEST_PAUSE_S", 0.01)
    refused = Player(RefusedError("no"), [])
    referee: Any = Referee(load_agent("web"), refused, reward=None)
    assert (await referee.play(Job(TASK, 0))).error == "RefusedError: no"
    assert len(refused.left) == 1
    failing = Player(*[EngineError("busy")] * 3)
    referee = Referee(load_agent("web"), failing, reward=None)
    assert (await referee.play(Job(TASK, 0))).error == "EngineError: busy"
    assert failing.left == []
