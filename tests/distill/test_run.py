import json
from pathlib import Path

import pytest
from team_log import segments_of

from afm.datasets import Task
from afm.datasets.mini_world import WorldSplit, generate
from afm.distill.event_log import EventKind, read_events
from afm.distill.merge import RoleMap
from afm.distill.run import distill, settle
from afm.distill.scripted_teams import ScriptedMathTeam, scripted_team
from afm.errors import ConfigError, DataError
from afm.runs.folder import RunFolder
from afm.trajectory import author_segments, load_records, validate

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.sandbox


def problems(count):
    return list(generate(WorldSplit.TRAIN, count, seed=0))


def taught(spec, seed=0):
    return {"team": scripted_team(spec, seed), "seed": seed}


async def test_math_problems_become_valid_right_trajectories(tmp_path, spec, tools):
    tasks, seen = problems(40), []
    options = {"progress": lambda *state: seen.append(state), **taught(spec)}
    summary = await distill(tasks, spec, tools, tmp_path, **options)

    kept = load_records(summary.path)
    dropped = load_records(tmp_path / "dropped.jsonl")
    assert (summary.tasks, summary.team.failed, summary.team.resumed) == (40, 0, 0)
    assert summary.kept == len(kept) == 40 - len(dropped) == 40 - sum(summary.dropped.values())
    assert sorted(record.id for record in (*kept, *dropped)) == sorted(task.id for task in tasks)
    assert [record.id for record in kept] == sorted(record.id for record in kept)
    for record in kept:
        assert validate(segments_of(record), spec) == ()
        assert author_segments(record.text, spec) == segments_of(record)
        assert record.text.endswith(f"<answer>\\boxed{{{record.ground_truth}}}</answer>")
        assert record.verdict.score == 1.0
    events = read_events(tmp_path / "events.jsonl")
    results = {event.task_id: event.content for event in events if event.kind is EventKind.TOOL_RESULT}
    called = [record for record in kept if record.calls]
    assert called
    for record in called:
        assert results[record.id] == record.ground_truth  # what the sandbox printed
        assert record.segments[1].text == f"\n<observation>\n{results[record.id]}\n</observation>\n"
    assert 0 < summary.tool_calls < 40
    assert seen[39] == ("team", 40, 40)
    assert seen[-1] == ("filter", 40, None)


async def test_the_result_does_not_depend_on_the_parallelism(tmp_path, spec, tools):
    one = await distill(problems(20), spec, tools, tmp_path / "one", **taught(spec), max_parallel=1)
    many = await distill(problems(20), spec, tools, tmp_path / "many", **taught(spec), max_parallel=8)

    texts = [[(row.id, row.text) for row in load_records(summary.path)] for summary in (one, many)]
    assert texts[0] == texts[1]


async def test_a_folder_belongs_to_the_tasks_and_the_seed_of_its_first_result(tmp_path, spec, tools):
    first, second = problems(2)
    settle(
        RunFolder(tmp_path), [second], scripted_team(spec), 5
    )  # as a run does that is killed before its first event
    await distill([first, second], spec, tools, tmp_path, **taught(spec))

    edited = second.model_copy(update={"question": f"{second.question} "})
    for tasks in ([first], [first, edited]):
        with pytest.raises(ConfigError, match=r"other settings \(tasks: "):
            await distill(tasks, spec, tools, tmp_path, **taught(spec))
    with pytest.raises(ConfigError, match=r"other settings \(seed: 0 -> 1\); choose another --output-dir"):
        await distill([first, second], spec, tools, tmp_path, **taught(spec, seed=1))
    with pytest.raises(DataError, match="no tasks to distil"):
        await distill([], spec, tools, tmp_path / "new", **taught(spec))


async def test_questions_the_team_cannot_read_are_dropped_with_a_reason_and_the_rest_is_kept(
    tmp_path, spec, tools
):
    odd = [
        Task(id=f"odd{n}", question=f"What is 2+{n}?", ground_truth=str(2 + n), data_source="mini_math")
        for n in range(30)
    ]

    summary = await distill([*problems(3), *odd], spec, tools, tmp_path, **taught(spec))

    assert (summary.kept, summary.team.declined, summary.team.failed, summary.not_tried) == (3, 30, 0, 0)
    assert summary.dropped == {"team declined": 30}
    assert "cannot read this question" in load_records(tmp_path / "dropped.jsonl")[-1].reason


async def test_members_that_play_no_role_of_the_agent_are_refused_before_any_work(tmp_path, spec, tools):
    class Strategists(ScriptedMathTeam):
        roles = RoleMap(messages={"planner": "strategy"})

    with pytest.raises(ConfigError, match="'planner' -> 'strategy' is not a role of agent 'math'"):
        await distill(problems(2), spec, tools, tmp_path, team=Strategists(spec))
    assert not (tmp_path / "events.jsonl").exists()


async def test_the_manifest_says_what_was_made_from_what(tmp_path, spec, tools):
    summary = await distill(problems(5), spec, tools, tmp_path, **taught(spec, seed=4))

    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["counts"]["tasks"], manifest["counts"]["kept"]) == (5, summary.kept)
    assert (manifest["seed"], manifest["agent"]) == (4, {"name": "math", "digest": spec.digest})
    assert len(manifest["inputs"]["events.jsonl"]) == 64
    assert manifest["roles"]["critic"] == "reflection"
