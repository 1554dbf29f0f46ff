import asyncio
from pathlib import Path

import pytest
from team_log import read_attempts
from wiki_pages import PageOfTheName, Says, questions

from afm.agents import load_agent
from afm.datasets import Task
from afm.distill.event_log import EventKind, EventLog, read_events
from afm.distill.merge import merge_attempt
from afm.distill.model_team.team import load_team
from afm.trajectory.tags import split

ROOT = Path(__file__).parents[3]


def is_writer(request):
    return request["messages"][0]["content"].startswith("You write the final")


async def worked(path, name, task, *overrides):
    team = load_team(ROOT / f"configs/distill/{name}.yaml", overrides=overrides)
    try:
        with EventLog(path) as log:
            await team.solve(log.begin(task, 0, {"wiki_search": PageOfTheName()}))
    finally:
        await team.close()
    (attempt,) = read_attempts(path)
    return attempt, merge_attempt(attempt, team.spec, team.roles)


def roles(record, agent):
    return [step.role for step in split(record.text, load_agent(agent)).steps]


async def test_a_team_of_models_becomes_a_trajectory_with_a_double_check(tmp_path, teacher):
    attempt, record = await worked(tmp_path / "e", "wiki", questions(1)[0])

    assert record.reason == ""
    assert roles(record, "wiki") == [
        *("think", "plan"),
        *("think", "wiki_search", "observation", "think", "reflection"),
        *("think", "wiki_search", "observation", "think", "suggested_answer"),
        *("think", "double_check", "think", "answer"),
    ]
    assert record.text.endswith(f"<answer>{record.ground_truth}</answer>")
    results = [event.content for event in attempt if event.kind is EventKind.TOOL_RESULT]
    observed = [part.text for part in record.segments if part.author == "environment"]
    assert observed == [f"\n<observation>\n{text}\n</observation>\n" for text in results]


async def test_a_low_score_and_a_poor_grade_lead_to_new_plans(tmp_path, teacher):
    teacher.doubt = teacher.worry = lambda question: True

    _, record = await worked(tmp_path / "e", "wiki", questions(1, [3])[0], "limits.calls_per_step=1")

    found = roles(record, "wiki")
    assert record.reason == ""
    assert [found.count(role) for role in ("plan", "suggested_answer", "double_check")] == [3, 2, 2]
    assert "Tool effectiveness: poor. Too slow." in record.text
    assert found[found.index("double_check") + 1 :][:2] == ["think", "plan"]
    assert record.text.endswith(f"<answer>{record.ground_truth}</answer>")


async def test_without_a_new_tool_call_there_is_nothing_to_reflect_on(tmp_path, teacher):
    places = (0, 0, 1)  # the second sub-task has its fact already and calls no tool
    teacher._planner = lambda *_: {"steps": [f"Find fact {place}: so" for place in places]}

    _, record = await worked(tmp_path / "e", "wiki", questions(1)[0])

    assert record.reason == ""
    assert teacher.asked["reflector"] == 1


async def test_a_refused_answer_is_told_to_the_writer_and_to_no_one_before(tmp_path, teacher):
    teacher.doubt = lambda question: True

    _, record = await worked(tmp_path / "e", "wiki", questions(1)[0])

    messages = [request["messages"][1]["content"] for request in teacher.requests]
    writers = [text for request, text in zip(teacher.requests, messages, strict=True) if is_writer(request)]
    refused = [text.partition("Suggested before and refused:\n")[2].strip() for text in writers]
    assert refused == ["", f"- {record.ground_truth}"]


@pytest.mark.slow
async def test_a_pause_that_the_server_asks_for_holds_back_all_requests_to_it(tmp_path, teacher):
    teacher.retry_after = "2"
    teacher._fault = lambda: "429" if len(teacher.requests) == 1 else ""
    first, second = questions(2)
    team = load_team(ROOT / "configs/distill/wiki.yaml")
    tools = {"wiki_search": PageOfTheName()}
    with EventLog(tmp_path / "e") as log:
        running = asyncio.create_task(team.solve(log.begin(first, 0, tools)))
        # Until the refusal has come back; the log tells nobody.
        while not any(event.kind is EventKind.CALL for event in read_events(tmp_path / "e")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.gather(running, team.solve(log.begin(second, 1, tools)))
    await team.close()

    assert all(attempt[-1].kind is EventKind.FINAL for attempt in read_attempts(tmp_path / "e"))
    assert min(teacher.arrived[1:]) - teacher.arrived[0] >= 2


async def test_the_verifier_speaks_in_the_reflection_of_an_agent_without_a_double_check(tmp_path, teacher):
    teacher.doubt = lambda question: True

    _, record = await worked(tmp_path / "e", "mhqa", questions(1)[0])

    found = roles(record, "mhqa")
    assert record.reason == ""
    assert found == [
        *("think", "plan"),
        *("think", "wiki_search", "observation", "think", "reflection"),
        *("think", "wiki_search", "observation", "think", "reflection"),
        *("think", "plan", "think", "answer"),
    ]
    assert "It cannot be given yet: Look again.</reflection><think>" in record.text
    assert record.provenance["repairs"]["dropped message"] == 1, "nothing was looked up for the second plan"


def mathematician(member, user):
    """Reflects on every run."""
    good = {"grade": "good", "why": "Fine."}
    criteria = dict.fromkeys(("information_conflict", "tool_effectiveness", "trajectory_monitoring"), good)
    match member:
        case "planner":
            return {"thought": "A product.", "steps": ["Compute 6*7"]}
        case "searcher" if "Result of code" in user:
            return {"finding": "It is 42."}
        case "searcher":
            return {"tool": "code", "argument": "```python\nprint(6*7)\n```"}
        case "reflector":
            return {"thought": "I look.", **criteria, "advice": "Answer.", "ready": True}
        case "writer":
            return {"thought": "So it is 42.", "answer": "42"}
        case _:
            return {"findings": "6*7 = 42.", "score": 3, "conclusion": "It holds."}


async def worked_on_math(path):
    team = load_team(ROOT / "configs/distill/math.yaml")
    task = Task(id="m", question="What is 6*7?", ground_truth="42", data_source="mini_math")
    with EventLog(path) as log:
        await team.solve(log.begin(task, 0, {"code": Says("42\n")}))
    await team.close()
    (attempt,) = read_attempts(path)
    return attempt, merge_attempt(attempt, team.spec, team.roles)


async def test_an_agent_that_plans_once_reflects_on_every_run(tmp_path, teacher):
    teacher.replies = mathematician
    _, record = await worked_on_math(tmp_path / "e")

    assert record.reason == ""
    assert record.text == (
        "<plan>1. Compute 6*7</plan>"
        "<think>Next: Compute 6*7</think><code>\n```py\nprint(6*7)\n```\n</code>"
        "\n<observation>\n42\n</observation>\n"
        "<reflection>Fine. Fine. Fine. Answer.</reflection>"
        "<think>It is 42.\n\nSo it is 42.\n\nIt holds.</think><answer>\\boxed{42}</answer>"
    )
    repairs = {"dropped thought": 2, "joined thoughts": 2, "missing thought": 1}
    assert record.provenance["repairs"] == repairs


async def test_of_an_agent_that_plans_once_criticism_is_the_next_sub_task(tmp_path, teacher):
    scores = iter((1, 3))

    def doubted(member, user):
        reply = mathematician(member, user)
        return reply | {"score": next(scores)} if member == "verifier" else reply

    teacher.replies = doubted
    _, record = await worked_on_math(tmp_path / "e")

    assert record.reason == ""
    assert (teacher.asked["planner"], teacher.asked["verifier"]) == (1, 2)
    tasks = [request["messages"][1]["content"] for request in teacher.requests]
    assert any("Your sub-task: It holds." in text for text in tasks)


async def test_a_call_that_was_made_already_is_not_made_again_and_the_member_is_told(tmp_path, teacher):
    def repeats(member, user):
        if member == "searcher" and "was made already" not in user:
            return {"tool": "code", "argument": "print(6*7)"}
        return mathematician(member, user) | ({"ready": False} if member == "reflector" else {})

    teacher.replies = repeats
    attempt, _ = await worked_on_math(tmp_path / "e")

    assert [event.kind for event in attempt].count(EventKind.TOOL_CALL) == 1
    messages = [request["messages"][1]["content"] for request in teacher.requests]
    assert sum("this tool call was made already" in text for text in messages) == 1
