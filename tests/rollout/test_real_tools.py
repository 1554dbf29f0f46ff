"""The shipped math agent with the real sandbox, and with a real model."""

import asyncio
from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.models.scripted import ScriptedModel
from afm.rollout import run_episode
from afm.tools import load_tools
from afm.trajectory import validate
from afm.trajectory.record import StopReason

CONFIG = Path(__file__).parents[2] / "configs/tools/code_executor.yaml"


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
