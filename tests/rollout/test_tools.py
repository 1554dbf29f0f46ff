"""Tools of an episode: they know what it is after, and a real sandbox answers."""

import asyncio
from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.models.scripted import ScriptedModel
from afm.rollout import run_episode
from afm.tools import ToolResult, load_tools
from afm.tools.base import current_goal
from afm.trajectory import validate
from afm.trajectory.record import StopReason

CONFIG = Path(__file__).parents[2] / "configs/tools/code_executor.yaml"


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
    await asyncio.gather(
        *(
            run_episode(
                spec,
                ScriptedModel([f"<calc>{number}</calc>", "<answer>5</answer>"]),
                {"calculator": listener},
                f"Question {number}?",
            )
            for number in range(5)
        )
    )
    assert sorted(listener.goals) == [(str(number), f"Question {number}?") for number in range(5)]


@pytest.mark.sandbox
async def test_programs_run_and_their_output_comes_back():
    script = [
        "<plan>1. Compute.</plan><think>run it</think><code>```py\nprint(6 * 7)\n```</code>",
        "<reflection>wrong on purpose now</reflection><think>divide</think><code>```py\nprint(1 // 0)\n```</code>",
        "<reflection>42 stands</reflection><think>done</think><answer>\\boxed{42}</answer>",
    ]
    spec = load_agent("math")
    tools = load_tools(CONFIG)
    try:
        episode = await run_episode(spec, ScriptedModel(script), tools, "What is 6 * 7?")
    finally:
        await asyncio.gather(*(tool.close() for tool in tools.values()))
    assert episode.segments[1].text == "\n<observation>\n42\n</observation>\n"
    assert "ZeroDivisionError" in episode.segments[3].text
    assert [call.ok for call in episode.calls] == [True, True]
    assert episode.stop is StopReason.ANSWER
    assert validate(episode.segments, spec) == ()
    assert episode.cost.tool_seconds > 0
