"""Tools of an episode know what it is after."""

import asyncio

from afm.models.base import ScriptedModel
from afm.rollout import run_episode
from afm.tools import ToolResult
from afm.tools.base import current_goal


class Listener:
    """Says nothing, remembers the goal."""

    name = "calculator"

    def __init__(self):
        self.goals = []

    async def call(self, argument):
        await asyncio.sleep(0.01)
        self.goals.append((argument, current_goal()))
        return ToolResult("ok")

    async def close(self):
        pass


async def test_a_tool_sees_the_question_and_the_last_thought(spec):
    listener = Listener()
    script = [
        "<think>one</think><think>two </think><calc>1</calc>",
        "<calc>2</calc>",
        "<think>x</think><answer>5</answer>",
    ]
    await run_episode(spec, ScriptedModel(script), {"calculator": listener}, " Why? ")
    assert listener.goals == [("1", "Why?\ntwo"), ("2", "Why?\ntwo")]
    assert current_goal() == ""


async def test_goals_of_episodes_at_the_same_time_do_not_mix(spec):
    listener = Listener()

    async def play(number):
        model = ScriptedModel([f"<calc>{number}</calc>", "<answer>5</answer>"])
        await run_episode(spec, model, {"calculator": listener}, f"Question {number}?")

    await asyncio.gather(*map(play, range(5)))
    assert sorted(listener.goals) == [(str(number), f"Question {number}?") for number in range(5)]
