"""Tools of an episode know what it is after."""

import asyncio
import json

from afm.models.base import ScriptedModel
from afm.rollout import run_episode
from afm.tools import ToolResult, load_tools
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


async def test_a_bug_in_a_users_tool_is_logged_for_its_author_with_its_place(spec, tmp_path, caplog):
    (tmp_path / "broken_tool.py").write_text(
        """from afm.tools import ToolResult


class Broken:
    name = "calculator"

    @classmethod
    def from_config(cls, config, context):
        return cls()

    async def call(self, argument):
        return ToolResult(str(1 / int(argument)))

    async def close(self):
        pass
"""
    )
    function = {"name": "calculator", "description": "Divides.", "parameters": {}}
    entry = {"class_name": "broken_tool.Broken", "tool_schema": {"type": "function", "function": function}}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    tools = load_tools(tmp_path / "tools.yaml")
    for number in range(2):
        script = [
            "<think>t</think><calc>0</calc>",
            "<calc>0.0</calc>",
            "<calc>2</calc>",
            "<answer>5</answer>",
        ]
        episode = await run_episode(spec, ScriptedModel(script), tools, f"Question {number}?")
        assert [call.ok for call in episode.calls] == [False, False, True]
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    division = "the tool 'calculator' failed: broken_tool.py:12: ZeroDivisionError: division by zero"
    assert lines[0] == f"{division} (the agent reads this as the observation)"
    assert "broken_tool.py:12: ValueError: invalid literal" in lines[1]
    assert len(lines) == 4
