import asyncio
from pathlib import Path
from statistics import fmean

import pytest
from team_log import segments_of
from wiki_pages import WORLD, PageOfTheName, Says, questions

from afm.agents import load_agent
from afm.datasets import Task
from afm.datasets.encyclopaedia import Encyclopaedia, Shape, generate
from afm.datasets.mini_world import WorldSplit
from afm.datasets.mini_world import generate as problems
from afm.distill.event_log import EventLog, read_events
from afm.distill.filters.registry import FilterPlan
from afm.distill.filters.run import filter_files
from afm.distill.run import distill
from afm.distill.scripted_teams import (
    WIKI_P_DIRECT,
    Flaws,
    ScriptedMathTeam,
    ScriptedWikiTeam,
    scripted_team,
)
from afm.errors import ConfigError
from afm.trajectory import load_records, validate
from afm.trajectory.io import RecordWriter

TINY = Path(__file__).parents[2] / "configs/tiny/agents"
ALWAYS, NEVER = {1: 1.0, 2: 1.0}, {}
APPLES = "Tom has 12 apples. Tom finds 30 more. Then the number of apples grows 4 times. How many apples does Tom have?"
BRIEF = Encyclopaedia(400, seed=3, brief=True)


@pytest.fixture(scope="module")
def plain():
    return load_agent(TINY / "mhqa.yaml")


@pytest.fixture(scope="module")
def checking():
    return load_agent(TINY / "wiki.yaml")


def apples(question=APPLES):
    return Task(id="apples", question=question, ground_truth="168", data_source="mini_math")


async def logged(path, team, tool, tasks):
    with EventLog(path) as log:
        for task in tasks:
            await team.solve(log.begin(task, 0, {"code": tool, "wiki_search": tool}))
    return list(read_events(path))


async def work(path, team, tool, task):
    events = await logged(path, team, tool, [task])
    return [(event.kind.value, event.agent, event.content) for event in events][1:]


@pytest.mark.sandbox
async def test_with_the_tool_the_program_really_runs(tmp_path, spec, tools):
    team = ScriptedMathTeam(spec, p_direct=NEVER)
    assert await work(tmp_path / "e", team, tools["code"], apples()) == [
        ("message", "planner", "Write one expression and run it."),
        ("message", "coder", "The expression is (12+30)*4."),
        ("tool_call", "coder", "\n```py\nprint((12+30)*4)\n```\n"),
        ("tool_result", "", "168"),
        ("message", "critic", "A number came back."),
        ("message", "writer", "Done."),
        ("final", "writer", "168"),
    ]


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("slip", "seen", "criticism"),
    [
        ("print(8-14)", "-6", "A negative number. Read the question again."),
        ("print(8/14)", "0.5714285714285714", "Not a whole number. Read the question again."),
    ],
)
async def test_a_slip_is_seen_and_corrected(tmp_path, spec, tools, slip, seen, criticism):
    extra = {"program": "print(14-8)", "slip": slip}
    task = Task(id="books", question="?", ground_truth="6", data_source="svamp", extra_info=extra)
    team = ScriptedMathTeam(spec, p_corrected=1)
    assert await work(tmp_path / "e", team, tools["code"], task) == [
        ("message", "planner", "Write one program and run it."),
        ("message", "coder", "Lines: 1."),
        ("tool_call", "coder", f"\n```py\n{slip}\n```\n"),
        ("tool_result", "", seen),
        ("message", "critic", criticism),
        ("message", "coder", "Lines: 1."),
        ("tool_call", "coder", "\n```py\nprint(14-8)\n```\n"),
        ("tool_result", "", "6"),
        ("message", "critic", "A number came back."),
        ("message", "writer", "Done."),
        ("final", "writer", "6"),
    ]
    without = await logged(tmp_path / "w", ScriptedMathTeam(spec, p_corrected=0), tools["code"], [task])
    assert [event.content for event in without if event.kind.value == "tool_result"] == ["6"]


@pytest.mark.parametrize(("p_slip", "answer"), [(0, "168"), (1, "158")])
async def test_directly_there_is_no_call_and_a_slip_is_off_by_one_carry(tmp_path, spec, p_slip, answer):
    team = ScriptedMathTeam(spec, p_direct=ALWAYS, p_slip=p_slip)

    assert await work(tmp_path / "e", team, None, apples()) == [
        ("message", "planner", "Answer at once."),
        ("message", "writer", "This one is easy."),
        ("final", "writer", answer),
    ]


@pytest.mark.parametrize(
    ("text", "ok"), [("Traceback: no", True), ("The code tool failed", False), ("168", False)]
)
async def test_the_critic_sends_the_coder_back_once_and_then_the_team_gives_up(tmp_path, spec, text, ok):
    team = ScriptedMathTeam(spec, p_direct=NEVER)

    events = await work(tmp_path / "e", team, Says(text, ok), apples())

    assert [content for kind, _, content in events if kind == "tool_result"] == [text, text]
    messages = [content for _, agent, content in events if agent == "critic"]
    assert messages == ["No number came back. Read the question again."] * 2
    assert events[-1] == ("error", "", f"2 tool calls returned no number, the last one: {text}")


async def test_questions_of_another_kind_are_left_alone(tmp_path, spec, plain):
    [by_width] = generate(WORLD, WorldSplit.TRAIN, 1, seed=0, hops=[2], shapes=[Shape.COMPARISON])

    for team, task in (
        (ScriptedMathTeam(spec), apples("What is 2+2?")),
        (ScriptedWikiTeam(plain), by_width),
    ):
        events = await work(tmp_path / team.name, team, PageOfTheName(), task)
        assert [kind for kind, _, _ in events] == ["error"]


async def skipped(path, team, tool, tasks):
    """Ids of the tasks that were answered without the tool, by their number of steps or hops."""
    called = {event.task_id for event in await logged(path, team, tool, tasks) if event.tool}
    groups = {1: [], 2: []}
    for task in tasks:
        groups[task.extra_info.get("steps") or task.extra_info["hops"]].append(task.id not in called)
    return {size: fmean(direct) for size, direct in groups.items()}


async def test_their_habit_is_to_skip_the_tool_on_easy_questions(tmp_path, spec, plain):
    some = list(problems(WorldSplit.TRAIN, 1500, seed=0))
    direct = await skipped(tmp_path / "math", ScriptedMathTeam(spec, seed=1), Says("1"), some)
    # four standard errors of 780 and 720 draws
    assert direct == {1: pytest.approx(0.75, abs=0.062), 2: pytest.approx(0.20, abs=0.060)}

    some = questions(1_200, (1, 2), Encyclopaedia(2_000))
    elsewhere = Says(WORLD.page(7).contents)
    direct = await skipped(tmp_path / "wiki", ScriptedWikiTeam(plain, seed=1), elsewhere, some)
    # four standard errors of 600 draws
    assert direct == {size: pytest.approx(WIKI_P_DIRECT[size], abs=0.082) for size in (1, 2)}


@pytest.mark.parametrize("world", ["math", "wiki"])
async def test_a_seed_fixes_every_choice_whatever_ran_before(tmp_path, spec, plain, world):
    team, tasks, tool = {
        "math": (ScriptedMathTeam(spec, seed=5), list(problems(WorldSplit.TRAIN, 30, seed=0)), Says("1")),
        "wiki": (ScriptedWikiTeam(plain, seed=5), questions(30, (1, 2)), PageOfTheName()),
    }[world]

    async def plans(name, order):
        events = await logged(tmp_path / name, team, tool, order)
        return {event.task_id: event.content for event in events if event.agent == "planner"}

    assert await plans("a", tasks) == await plans("b", tasks[::-1])


async def test_from_memory_there_is_no_search_and_the_first_gold_answer_is_said(tmp_path, plain):
    asked = "What is the mayor of Belo Karford?"
    task = Task(id="t", question=asked, ground_truth=["Zuta Bafmoor", "Zuta B."])

    assert await work(tmp_path / "e", ScriptedWikiTeam(plain, p_direct=ALWAYS), None, task) == [
        ("message", "leader", "I know this."),
        ("message", "planner", "Answer at once."),
        ("message", "leader", "Easy."),
        ("final", "writer", " Zuta Bafmoor"),
    ]


@pytest.mark.parametrize("ok", [True, False])
async def test_what_no_passage_told_is_not_made_up(tmp_path, plain, ok):
    task = next(task for task in questions(8) if task.extra_info["path"][0]["passage"] != "7")
    elsewhere = Says(WORLD.page(7).contents, ok)

    events = await work(tmp_path / "e", ScriptedWikiTeam(plain, p_direct=NEVER), elsewhere, task)

    assert [kind for kind, _, _ in events][-2:] == ["tool_result", "error"]
    assert f"no passage gives the {task.extra_info['path'][0]['asks']}" in events[-1][2]


async def distilled(path, team, count, hops=(1, 2), world=WORLD, filters=None):
    tools = {"wiki_search": PageOfTheName(world)}
    summary = await distill(questions(count, hops, world), team.spec, tools, path, team=team, filters=filters)
    return summary, load_records(summary.path)


async def test_the_work_becomes_right_trajectories_that_the_agent_allows(tmp_path, plain):
    summary, records = await distilled(tmp_path, ScriptedWikiTeam(plain), 60)

    assert (summary.kept, summary.dropped) == (60, {})
    for record in records:
        assert validate(segments_of(record), plain) == ()
        assert record.text.endswith(f"<answer> {record.ground_truth}</answer>")
        assert len(record.calls) in (0, len(record.provenance["extra_info"]["path"]))
    assert {len(record.calls) for record in records} == {0, 1, 2}


async def checked(path, spec, hops=2, **settings):
    """The steps of one trajectory of the team that checks, without observations."""
    _, [record] = await distilled(path, ScriptedWikiTeam(spec, **settings), 1, [hops], BRIEF, filters=())
    return "".join(part.text for part in record.segments if part.author == "agent"), record


async def test_a_careful_team_checks_what_it_read_and_answers(tmp_path, checking):
    text, record = await checked(tmp_path, checking, reflects=0)
    first, last = record.provenance["extra_info"]["path"]

    def sentence(hop):
        return f"{hop['asks'].capitalize()} {hop['gives']}"

    assert text == (
        "<think>Two facts to find.</think>"
        f"<plan>Search for the {first['asks']}, then the {last['asks']}.</plan>"
        f"<think>Now the {first['asks']} of {first['title']}.</think>"
        f"<wiki_search>{first['asks']} of {first['title']}</wiki_search>"
        f"<think>{sentence(first)}.\n\nNow the {last['asks']} of {last['title']}.</think>"
        f"<wiki_search>{last['asks']} of {last['title']}</wiki_search>"
        f"<think>{sentence(last)}.</think><suggested_answer> {last['gives']}</suggested_answer>"
        f"<think>{sentence(last)}.</think><double_check>Score: 4</double_check>"
        f"<think>Sure.</think><answer> {last['gives']}</answer>"
    )


async def test_a_misreading_is_found_by_the_checker_and_corrected(tmp_path, checking):
    text, record = await checked(tmp_path, checking, hops=1, flaws=Flaws(misread=1.0))

    wrong = text.partition("<suggested_answer> ")[2].partition("<")[0]
    assert wrong != record.ground_truth
    assert text.count("<double_check>Score: 2</double_check>") == 1
    assert text.endswith(f"<think>Sure.</think><answer> {record.ground_truth}</answer>")
    assert len({call.argument for call in record.calls}) == 2


async def test_one_flaw_moves_no_other_choice(tmp_path, checking):
    async def records(name, **flaws):
        team = ScriptedWikiTeam(checking, flaws=Flaws(misread=0.5, **flaws))
        return (await distilled(tmp_path / name, team, 40, world=BRIEF, filters=()))[1]

    few, many = await records("few"), await records("many", repeated=1.0)

    def rejected(rows):
        return [row.id for row in rows if "Score: 2" in row.text]

    assert rejected(few) == rejected(many) != []
    assert sum(len(row.calls) for row in many) == sum(len(row.calls) for row in few) + 40


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ({"p_direct": ALWAYS}, "complexity"),
        ({"flaws": Flaws(unchecked=1.0)}, "format"),
        ({"flaws": Flaws(repeated=1.0)}, "repetition"),
        ({"flaws": Flaws(misread=1.0, overlooked=1.0)}, "quality"),
    ],
)
def test_each_flaw_is_what_its_filter_catches(tmp_path, checking, settings, stage):
    team = ScriptedWikiTeam(checking, **settings)
    summary, kept = asyncio.run(distilled(tmp_path, team, 20, world=BRIEF, filters=()))
    recorded = [*kept, *load_records(tmp_path / "dropped.jsonl")]
    assert len(recorded) == summary.tasks == 20
    with RecordWriter(tmp_path / "raw.jsonl") as writer:
        for row in recorded:
            writer.write(row.model_copy(update={"kept": True, "reason": ""}))
    stages = [{"complexity": {"min_calls": 1}}, {"format": {}}, {"repetition": {}}, {"quality": {}}]

    plan = FilterPlan.model_validate({"stages": stages})
    found = filter_files([tmp_path / "raw.jsonl"], plan, checking, tmp_path / "filtered", picture=False)

    assert found.funnel.dropped == {stage: 20}


async def test_without_flaws_nothing_is_dropped_and_every_second_reflects(tmp_path, checking):
    summary, records = await distilled(tmp_path, scripted_team(checking), 60, world=BRIEF)

    assert (summary.kept, summary.dropped) == (60, {})
    assert 15 <= sum("<reflection>" in row.text for row in records) <= 45


MATH_ROLES = {"planner": "plan", "coder": "think", "critic": "reflection", "writer": "think"}
MHQA_ROLES = {"leader": "think", "planner": "plan", "critic": "reflection"}
WIKI_ROLES = {"leader": "think", "planner": "plan", "reflector": "reflection"}
WIKI_ROLES |= {"proposer": "suggested_answer", "checker": "double_check"}


@pytest.mark.parametrize(
    ("agent", "name", "roles"),
    [
        ("math", "scripted_math", MATH_ROLES),
        ("mhqa", "scripted_wiki", MHQA_ROLES),
        ("wiki", "checking_wiki", WIKI_ROLES),
    ],
)
def test_the_agent_chooses_the_team_and_the_roles_of_its_members(agent, name, roles):
    team = scripted_team(load_agent(agent))
    assert (team.name, team.roles.messages) == (name, roles)


OWN = """
name: own
roles:
  outline: {}
  muse: {kind: thought}
  python: {kind: tool, tool: code, needs_thought: true}
  output: {kind: observation}
  verdict: {}
  result: {kind: answer, needs_thought: true}
transitions: {start: [outline], outline: [python, result], python: [verdict], verdict: [python, result]}
"""


def test_an_agent_with_other_names_for_its_functions_works_too(tmp_path):
    (tmp_path / "own.yaml").write_text(OWN)
    own = {"planner": "outline", "coder": "muse", "critic": "verdict", "writer": "muse"}
    assert ScriptedMathTeam(load_agent(tmp_path / "own.yaml")).roles.messages == own


def test_an_agent_with_several_tools_is_refused_in_words():
    with pytest.raises(ConfigError, match="agent 'full' has the tools"):
        scripted_team(load_agent("full"))
    with pytest.raises(ConfigError, match="agent 'web': the scripted math team needs exactly one choice"):
        _ = ScriptedMathTeam(load_agent("web")).roles
