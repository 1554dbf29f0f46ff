"""A team as the player of an evaluation; the command is tested in tests/evaluation/test_team.py."""

import pytest
from wiki_pages import PageOfTheName, questions

from afm.agents import load_agent
from afm.datasets import Task
from afm.distill.event_log import read_events
from afm.distill.scripted_teams import ScriptedWikiTeam
from afm.distill.team_player import TeamPlayer
from afm.errors import EngineError, RefusedError
from afm.trajectory.record import SEALING_KEY, opened, sealed

SPEC = load_agent("mhqa")


class Broken:
    """A team whose model's server fails for good."""

    name, roles = "broken", ScriptedWikiTeam(SPEC).roles

    async def solve(self, recorder):
        recorder.say("leader", "One moment.")
        raise EngineError("the server is down")


def player(path, team):
    return TeamPlayer(team, SPEC, {"wiki_search": PageOfTheName()}, path)


async def test_of_a_sealed_task_nothing_is_written_in_plain_form(tmp_path):
    task = questions(1)[0].model_copy(update={"extra_info": {SEALING_KEY: "canary"}})
    with player(tmp_path / "log", ScriptedWikiTeam(SPEC, p_direct={})) as team:
        record = await team.play("q#0", task, 7)

    assert record.text.endswith(f"<answer> {task.ground_truth}</answer>")
    names = {task.question, task.ground_truth, *(call.argument for call in record.calls)}
    written = (tmp_path / "log").read_text() + sealed(record, "canary").model_dump_json()
    assert len(record.calls) == 2
    assert not any(name in written for name in names)
    assert [event.kind for event in read_events(tmp_path / "log")].count("tool_call") == 2
    assert opened(sealed(record, "canary")).provenance["team"] == record.provenance["team"]
    # An answer that is not there is asked for.
    with player(tmp_path / "log", ScriptedWikiTeam(SPEC, p_direct={})) as again:
        assert (await again.play("q#0", task, 7)).provenance["attempt"] == 2


async def test_a_task_that_the_team_cannot_read_is_refused_and_not_scored(tmp_path):
    task = Task(id="t", question="Why is the sky blue?", ground_truth="x", data_source="nq")
    refused = pytest.raises(RefusedError, match="cannot read this question")
    with player(tmp_path / "log", ScriptedWikiTeam(SPEC)) as team, refused:
        await team.play("t#0", task, 0)


async def test_a_failing_server_ends_the_attempt_in_the_log_and_raises(tmp_path):
    with player(tmp_path / "log", Broken()) as team:
        for _ in range(2):
            with pytest.raises(EngineError, match="the server is down"):
                await team.play("q#0", questions(1)[0], 0)
    errors = [event for event in read_events(tmp_path / "log") if event.kind == "error"]
    assert [event.content for event in errors] == ["EngineError: the server is down"] * 2
    assert [event.attempt for event in errors] == [1, 2]
