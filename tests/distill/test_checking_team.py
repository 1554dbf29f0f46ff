import asyncio
from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.datasets.encyclopaedia import Encyclopaedia, generate
from afm.datasets.mini_world import WorldSplit
from afm.distill.filters.registry import FilterPlan
from afm.distill.filters.run import filter_files
from afm.distill.run import distill
from afm.distill.wiki_team import CheckingWikiTeam, Flaws, scripted_team
from afm.errors import ConfigError
from afm.tools import ToolResult
from afm.trajectory import load_records
from afm.trajectory.io import RecordWriter

ROOT = Path(__file__).parents[2]
WORLD = Encyclopaedia(400, seed=3, brief=True)


class Pages:
    """The encyclopaedia's own page for the first name in a query."""

    name = "wiki_search"

    async def call(self, argument):
        words = argument.split()
        pairs = [" ".join(words[at : at + 2]) for at in range(len(words) - 1)]
        number = next(number for pair in pairs if (number := WORLD.names.number(pair)) is not None)
        return ToolResult(f"[1] {WORLD.page(number).contents}")

    async def close(self):
        pass


@pytest.fixture(scope="module")
def spec():
    return load_agent(ROOT / "configs/tiny/agents/wiki.yaml")


def questions(count, hops=(1, 2)):
    return list(generate(WORLD, WorldSplit.RL, count, seed=0, hops=hops))


async def work(path, team, count=40, hops=(1, 2), filters=None):
    tools = {"wiki_search": Pages()}
    summary = await distill(
        questions(count, hops), team.spec, tools, path, team=team, roles=team.roles, filters=filters
    )
    return summary, load_records(summary.path)


async def one(path, spec, hops=2, **settings):
    """The steps of one trajectory, without observations; ``None`` when the merge refuses it."""
    _, records = await work(path, CheckingWikiTeam(spec, **settings), 1, [hops], filters=())
    if not records:
        return None, None
    agent = [part.text for part in records[0].segments if part.author == "agent"]
    return "".join(agent), records[0]


async def test_a_careful_team_checks_what_it_read_and_answers(tmp_path, spec):
    text, record = await one(tmp_path, spec, reflects=0)
    first, last = record.provenance["extra_info"]["path"]

    def told(hop):
        return f"{hop['asks'].capitalize()} {hop['gives']}"

    assert text == (
        "<think>Two facts to find.</think>"
        f"<plan>Search for the {first['asks']}, then the {last['asks']}.</plan>"
        f"<think>Now the {first['asks']} of {first['title']}.</think>"
        f"<wiki_search>{first['asks']} of {first['title']}</wiki_search>"
        f"<think>{told(first)}.\n\nNow the {last['asks']} of {last['title']}.</think>"
        f"<wiki_search>{last['asks']} of {last['title']}</wiki_search>"
        f"<think>{told(last)}.</think><suggested_answer> {last['gives']}</suggested_answer>"
        f"<think>{told(last)}.</think><double_check>Score: 4</double_check>"
        f"<think>Sure.</think><answer> {last['gives']}</answer>"
    )


async def test_a_misreading_is_found_by_the_checker_and_corrected(tmp_path, spec):
    text, record = await one(tmp_path, spec, hops=1, flaws=Flaws(misread=1.0))

    wrong = text.partition("<suggested_answer> ")[2].partition("<")[0]
    assert wrong != record.ground_truth
    assert text.count("<double_check>Score: 2</double_check>") == 1
    assert text.endswith(f"<think>Sure.</think><answer> {record.ground_truth}</answer>")
    assert len({call.argument for call in record.calls}) == 2


async def test_a_misreading_that_is_overlooked_becomes_a_wrong_answer(tmp_path, spec):
    text, record = await one(tmp_path, spec, hops=1, flaws=Flaws(misread=1.0, overlooked=1.0))

    assert "Score: 2" not in text
    assert not text.endswith(f"<answer> {record.ground_truth}</answer>")


async def test_one_flaw_moves_no_other_choice(tmp_path, spec):
    flaws = Flaws(misread=0.5), Flaws(misread=0.5, repeated=1.0)
    teams = [CheckingWikiTeam(spec, flaws=flaw) for flaw in flaws]
    few, many = [(await work(tmp_path / str(place), team, filters=()))[1] for place, team in enumerate(teams)]

    def rejected(records):
        return [row.id for row in records if "Score: 2" in row.text]

    assert rejected(few) == rejected(many) != []
    assert sum(len(row.calls) for row in many) == sum(len(row.calls) for row in few) + 40


@pytest.mark.parametrize(
    ("flaws", "stage"),
    [
        (Flaws(from_memory=1.0), "complexity"),
        (Flaws(unchecked=1.0), "format"),
        (Flaws(repeated=1.0), "repetition"),
        (Flaws(misread=1.0, overlooked=1.0), "quality"),
    ],
)
def test_each_flaw_is_what_its_filter_catches(tmp_path, spec, flaws, stage):
    summary, kept = asyncio.run(work(tmp_path, CheckingWikiTeam(spec, flaws=flaws), 20, filters=()))
    recorded = [*kept, *load_records(tmp_path / "dropped.jsonl")]
    assert len(recorded) == summary.tasks == 20
    with RecordWriter(tmp_path / "raw.jsonl") as writer:
        for row in recorded:
            writer.write(row.model_copy(update={"kept": True, "reason": ""}))
    stages = [{"complexity": {"min_calls": 1}}, {"format": {}}, {"repetition": {}}, {"quality": {}}]

    plan = FilterPlan.model_validate({"stages": stages})
    found = filter_files([tmp_path / "raw.jsonl"], plan, spec, tmp_path / "filtered", picture=False)

    assert found.funnel.dropped == {stage: 20}


async def test_without_flaws_nothing_is_dropped_and_every_second_reflects(tmp_path, spec):
    summary, records = await work(tmp_path, scripted_team(spec), 60)

    assert (summary.kept, summary.dropped) == (60, {})
    assert 15 <= sum("<reflection>" in row.text for row in records) <= 45


def test_the_team_is_chosen_by_the_check_and_its_members_have_roles(spec):
    assert scripted_team(load_agent("wiki")).roles.messages == {
        "leader": "think",
        "planner": "plan",
        "reflector": "reflection",
        "proposer": "suggested_answer",
        "checker": "double_check",
    }
    assert scripted_team(load_agent("mhqa")).name == "scripted_wiki"
    with pytest.raises(ConfigError, match="a check of the answer, got \\[\\]; use an agent like `wiki`"):
        _ = CheckingWikiTeam(load_agent("mhqa")).roles
