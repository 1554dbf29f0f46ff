from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.datasets import Task
from afm.datasets.encyclopaedia import Encyclopaedia, Shape, generate
from afm.datasets.mini_world import WorldSplit
from afm.distill.event_log import EventLog, read_events
from afm.distill.run import distill
from afm.distill.wiki_team import P_DIRECT, ScriptedWikiTeam, scripted_team
from afm.errors import ConfigError
from afm.tools import ToolResult
from afm.trajectory import load_records, validate
from afm.trajectory.types import Segment

ROOT = Path(__file__).parents[2]
ALWAYS, NEVER = {1: 1.0, 2: 1.0}, {}
WORLD = Encyclopaedia(200, seed=3)


class PageOfTheName:
    """The encyclopaedia's own page for the name at the end of a query."""

    name = "wiki_search"

    async def call(self, argument):
        number = WORLD.names.number(argument.rpartition(" of ")[2])
        return ToolResult("No passage was found." if number is None else f"[1] {WORLD.page(number).contents}")

    async def close(self):
        pass


class Elsewhere(PageOfTheName):
    """Always the same page, whatever is asked."""

    def __init__(self, ok=True):
        self.ok = ok

    async def call(self, argument):
        return ToolResult(WORLD.page(7).contents, ok=self.ok)


@pytest.fixture
def spec():
    return load_agent(ROOT / "configs/tiny/agents/mhqa.yaml")


def questions(count, hops=(1, 2), split=WorldSplit.TRAIN):
    return list(generate(WORLD, split, count, seed=0, hops=hops))


async def work(path, team, tool, task):
    with EventLog(path) as log:
        await team.solve(log.begin(task, 0, {"wiki_search": tool}))
    return [(event.kind.value, event.agent, event.content) for event in read_events(path)][1:]


async def test_two_facts_are_looked_up_one_after_the_other(tmp_path, spec):
    task = next(task for task in questions(20, hops=[2]) if "mayor" in task.question)
    first, last = task.extra_info["path"]

    events = await work(tmp_path / "e", ScriptedWikiTeam(spec, p_direct=NEVER), PageOfTheName(), task)

    told = [content for kind, _, content in events if kind != "tool_result"]
    assert told == [
        "Two facts to find.",
        f"Search for the {first['asks']}, then the {last['asks']}.",
        f"Now the {first['asks']} of {first['title']}.",
        f"{first['asks']} of {first['title']}",
        f"The {first['asks']} of {first['title']} is {first['gives']}.",
        "One more.",
        f"Now the {last['asks']} of {last['title']}.",
        f"{last['asks']} of {last['title']}",
        f"The {last['asks']} of {last['title']} is {last['gives']}.",
        f" {task.ground_truth}",
    ]


async def test_from_memory_there_is_no_search(tmp_path, spec):
    task = questions(1)[0]

    assert await work(tmp_path / "e", ScriptedWikiTeam(spec, p_direct=ALWAYS), None, task) == [
        ("message", "leader", "I know this."),
        ("message", "planner", "Answer at once."),
        ("message", "leader", "Easy."),
        ("final", "writer", f" {task.ground_truth}"),
    ]


@pytest.mark.parametrize("ok", [True, False])
async def test_what_no_passage_told_is_not_made_up(tmp_path, spec, ok):
    task = next(task for task in questions(8) if task.extra_info["path"][0]["passage"] != "7")

    events = await work(tmp_path / "e", ScriptedWikiTeam(spec, p_direct=NEVER), Elsewhere(ok), task)

    assert [kind for kind, _, _ in events][-2:] == ["tool_result", "error"]
    assert f"no passage told the {task.extra_info['path'][0]['asks']}" in events[-1][2]


async def test_a_question_by_width_is_left_alone(tmp_path, spec):
    [task] = generate(WORLD, WorldSplit.TRAIN, 1, seed=0, hops=[2], shapes=[Shape.COMPARISON])

    events = await work(tmp_path / "e", ScriptedWikiTeam(spec), PageOfTheName(), task)

    assert [kind for kind, _, _ in events] == ["error"]


async def test_its_work_becomes_right_trajectories_that_the_agent_allows(tmp_path, spec):
    team = ScriptedWikiTeam(spec)
    tools = {"wiki_search": PageOfTheName()}

    summary = await distill(questions(60), spec, tools, tmp_path, team=team, roles=team.roles)

    records = load_records(summary.path)
    assert (summary.kept, summary.dropped) == (60, {})
    for record in records:
        segments = tuple(Segment(part.author, part.text) for part in record.segments)
        assert validate(segments, spec) == ()
        assert record.text.endswith(f"<answer> {record.ground_truth}</answer>")
        assert len(record.calls) in (0, len(read_path(record)))
    assert {len(record.calls) for record in records} == {0, 1, 2}


def read_path(record):
    return record.provenance["extra_info"]["path"]


async def test_its_habit_is_to_answer_easy_questions_from_memory(tmp_path, spec):
    world = Encyclopaedia(2_000)
    tasks = list(generate(world, WorldSplit.TRAIN, 1_200, seed=0, hops=(1, 2)))
    with EventLog(tmp_path / "e") as log:
        for task in tasks:
            await ScriptedWikiTeam(spec, seed=1).solve(log.begin(task, 0, {"wiki_search": Elsewhere()}))
    searched = {event.task_id for event in read_events(tmp_path / "e") if event.tool}
    direct = [[task.id not in searched for task in tasks if task.extra_info["hops"] == n] for n in (1, 2)]

    # four standard errors of 600 draws
    assert sum(direct[0]) / 600 == pytest.approx(P_DIRECT[1], abs=0.082)
    assert sum(direct[1]) / 600 == pytest.approx(P_DIRECT[2], abs=0.082)


async def test_a_seed_fixes_every_choice_whatever_ran_before(tmp_path, spec):
    team, tasks = ScriptedWikiTeam(spec, seed=5), questions(30)

    async def plans(name, order):
        with EventLog(tmp_path / name) as log:
            for task in order:
                await team.solve(log.begin(task, 0, {"wiki_search": PageOfTheName()}))
        return {
            event.task_id: event.content for event in read_events(tmp_path / name) if event.agent == "planner"
        }

    assert await plans("a", tasks) == await plans("b", tasks[::-1])


def test_the_tool_of_an_agent_chooses_its_team(spec):
    assert scripted_team(spec).name == "scripted_wiki"
    assert scripted_team(load_agent("math")).name == "scripted_math"
    with pytest.raises(ConfigError, match="agent 'full' has the tools"):
        scripted_team(load_agent("full"))


def test_members_become_the_functions_that_the_agent_declares(spec):
    assert scripted_team(spec).roles.messages == {
        "leader": "think",
        "planner": "plan",
        "critic": "reflection",
    }


async def test_a_gold_answer_that_is_a_list_is_said_as_its_first(tmp_path, spec):
    task = Task(
        id="t", question="What is the mayor of Belo Karford?", ground_truth=["Zuta Bafmoor", "Zuta B."]
    )

    events = await work(tmp_path / "e", ScriptedWikiTeam(spec, p_direct=ALWAYS), None, task)

    assert events[-1] == ("final", "writer", " Zuta Bafmoor")
