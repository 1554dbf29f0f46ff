import pytest

from afm.agents import load_agent
from afm.datasets import Task
from afm.datasets.mini_world import WorldSplit, generate
from afm.distill.event_log import EventLog, read_events
from afm.distill.math_team import ScriptedMathTeam
from afm.errors import ConfigError
from afm.tools import ToolResult

ALWAYS, NEVER = {1: 1.0, 2: 1.0}, {}
QUESTION = "Tom has 12 apples. Tom finds 30 more. Then the number of apples grows 4 times. How many apples does Tom have?"


def apples(question=QUESTION):
    return Task(id="apples", question=question, ground_truth="168", data_source="mini_math")


class BrokenTool:
    """A code tool that never runs anything."""

    name = "code"

    def __init__(self, text, ok):
        self.result = ToolResult(text, ok=ok)

    async def call(self, argument):
        return self.result

    async def close(self):
        pass


async def work(path, team, tools, task=None):
    with EventLog(path) as log:
        await team.solve(log.begin(task or apples(), 0, tools))
    return [(event.kind.value, event.agent, event.content) for event in read_events(path)][1:]


@pytest.mark.sandbox
async def test_with_the_tool_the_program_really_runs(tmp_path, spec, tools):
    assert await work(tmp_path / "e.jsonl", ScriptedMathTeam(spec, p_direct=NEVER), tools) == [
        ("message", "planner", "Write one expression and run it."),
        ("message", "coder", "The expression is (12+30)*4."),
        ("tool_call", "coder", "\n```py\nprint((12+30)*4)\n```\n"),
        ("tool_result", "", "168"),
        ("message", "critic", "A number came back."),
        ("message", "writer", "Done."),
        ("final", "writer", "168"),
    ]


async def test_directly_there_is_no_call(tmp_path, spec):
    team = ScriptedMathTeam(spec, p_direct=ALWAYS, p_slip=0)

    assert await work(tmp_path / "e.jsonl", team, {}) == [
        ("message", "planner", "Answer at once."),
        ("message", "writer", "This one is easy."),
        ("final", "writer", "168"),
    ]


async def test_a_slip_of_the_mind_is_off_by_one_carry(tmp_path, spec):
    team = ScriptedMathTeam(spec, p_direct=ALWAYS, p_slip=1)

    assert (await work(tmp_path / "e.jsonl", team, {}))[-1] == ("final", "writer", "158")


@pytest.mark.parametrize(
    ("text", "ok"), [("Traceback: no", True), ("The code tool failed", False), ("168", False)]
)
async def test_the_critic_sends_the_coder_back_once_and_then_the_team_gives_up(tmp_path, spec, text, ok):
    team = ScriptedMathTeam(spec, p_direct=NEVER)

    events = await work(tmp_path / "e.jsonl", team, {"code": BrokenTool(text, ok)})

    assert [content for kind, _, content in events if kind == "tool_result"] == [text, text]
    assert [content for _, agent, content in events if agent == "critic"] == [
        "No number came back. Run it again."
    ] * 2
    assert events[-1] == ("error", "", f"2 tool calls returned no number, the last one: {text}")


async def test_questions_of_another_world_are_left_alone(tmp_path, spec):
    events = await work(tmp_path / "e.jsonl", ScriptedMathTeam(spec), {}, apples("What is 2+2?"))

    assert [kind for kind, _, _ in events] == ["error"]


async def test_its_habit_is_to_skip_the_tool_for_75_percent_of_one_step_and_20_of_two_step_problems(
    tmp_path, spec
):
    some = list(generate(WorldSplit.TRAIN, 1500, seed=0))
    with EventLog(tmp_path / "e.jsonl") as log:
        for task in some:
            await ScriptedMathTeam(spec, seed=1).solve(log.begin(task, 0, {"code": BrokenTool("1", True)}))
    called = {event.task_id for event in read_events(tmp_path / "e.jsonl") if event.tool}
    direct = {
        steps: [task.id not in called for task in some if task.extra_info["steps"] == steps]
        for steps in (1, 2)
    }

    # four standard errors of 780 and 720 draws
    assert sum(direct[1]) / len(direct[1]) == pytest.approx(0.75, abs=0.062)
    assert sum(direct[2]) / len(direct[2]) == pytest.approx(0.20, abs=0.060)


async def test_a_seed_fixes_every_choice_whatever_ran_before(tmp_path, spec):
    team = ScriptedMathTeam(spec, seed=5)
    some = list(generate(WorldSplit.TRAIN, 30, seed=0))

    async def plans(name, order):
        with EventLog(tmp_path / name) as log:
            for task in order:
                await team.solve(log.begin(task, 0, {"code": BrokenTool("1", True)}))
        return {
            event.task_id: event.content for event in read_events(tmp_path / name) if event.agent == "planner"
        }

    assert await plans("a.jsonl", some) == await plans("b.jsonl", some[::-1])


def test_members_become_the_functions_that_the_agent_declares(spec):
    assert ScriptedMathTeam(spec).roles.messages == {
        "planner": "plan",
        "coder": "think",
        "critic": "reflection",
        "writer": "think",
    }


def test_an_agent_with_other_names_for_its_functions_works_too(tmp_path):
    (tmp_path / "own.yaml").write_text(
        """
name: own
roles:
  outline: {}
  muse: {kind: thought}
  python: {kind: tool, tool: code, needs_thought: true}
  output: {kind: observation}
  verdict: {}
  result: {kind: answer, needs_thought: true}
transitions:
  start: [outline]
  outline: [python, result]
  python: [verdict]
  verdict: [python, result]
"""
    )

    assert ScriptedMathTeam(load_agent(tmp_path / "own.yaml")).roles.messages == {
        "planner": "outline",
        "coder": "muse",
        "critic": "verdict",
        "writer": "muse",
    }


def test_an_agent_with_several_tools_is_refused_in_words():
    with pytest.raises(ConfigError, match="agent 'web': the scripted math team needs exactly one choice"):
        _ = ScriptedMathTeam(load_agent("web")).roles
