"""A team that one model answers: a session keeps each member's conversation, whose work becomes one trajectory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from afm.agents import load_agent
from afm.datasets import Task
from afm.distill.run import distill
from afm.distill.team_player import open_team
from afm.distill.team_policy import TeamRunner, TrainedTeam
from afm.errors import ConfigError
from afm.harness import ChatRenderer, Session
from afm.harness.episode import HarnessEpisode, judge, member_verdicts
from afm.harness.settings import HarnessSettings
from afm.models.base import ScriptedModel
from afm.models.tiny import train_tokenizer
from afm.models.tokenizer import ChatTokenizer
from afm.rewards import load_reward
from afm.tools import Tool, load_tools
from afm.trajectory import read_records

ROOT = Path(__file__).resolve().parents[2]
TASK = Task(id="q", question="12+13?", data_source="mini_math", ground_truth="25")
FINE = {"grade": "good", "why": "Fine."}
PLAN = {"steps": ["Run 12+13."]}
CALL = {"tool": "code", "argument": "print(12+13)"}
LOOK = {
    "information_conflict": FINE,
    "tool_effectiveness": FINE,
    "trajectory_monitoring": FINE,
    "ready": True,
}
FOUND = {"finding": "It is 25."}
WORK = [PLAN, CALL, LOOK, FOUND]
"""Of planner, coder, reflector and coder."""


def wrote(answer: str, score: int) -> list[dict[str, Any]]:
    """Of writer and verifier."""
    return [{"answer": answer}, {"findings": "It was run.", "score": score, "conclusion": "So."}]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([json.dumps([*WORK, *wrote("25", 4)])] * 5, folder, vocab_size=300)
    return ChatTokenizer.load(folder)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped team, with a calculator in place of the sandbox."""
    folder = tmp_path_factory.mktemp("team")
    entry = {"class_name": "calculator.Calculator", "tool_schema": {"function": {"name": "code"}}}
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    file = folder / "team.yaml"
    shipped = {"extends": str(ROOT / "configs/distill/math.yaml"), "tools": "tools.yaml"}
    file.write_text(yaml.safe_dump(shipped))
    return file


def model_of(codec: ChatTokenizer, script: list[Any]) -> ScriptedModel:
    return ScriptedModel(
        [text if isinstance(text, str) else json.dumps(text) for text in script], codec, context_tokens=9000
    )


async def play(team: Path, codec: ChatTokenizer, script: list[Any], **settings: Any) -> HarnessEpisode:
    model = model_of(codec, script)
    runner = TeamRunner(HarnessSettings(team=team, retries=0, **settings), load_agent("math"))
    try:
        return await runner.play(TASK, [], lambda key, seed: Session(key, model, ChatRenderer(codec)), 1)
    finally:
        await runner.close()


async def test_each_member_has_its_conversations_and_every_sampled_token_is_kept(
    team: Path, codec: ChatTokenizer
) -> None:
    script = [*WORK, *wrote("24", 1), CALL | {"argument": "print(25)"}, LOOK, FOUND, *wrote("25", 4)]
    episode = await play(team, codec, script)
    assert (episode.answer, episode.failure) == ("25", "")
    spoke = ["planner", *["coder", "reflector", "coder", "writer", "verifier"] * 2]
    assert [trajectory.member for trajectory in episode.trajectories] == spoke
    for trajectory, said in zip(episode.trajectories, script, strict=True):
        sampled = [*codec.encode(json.dumps(said)), *codec.end_ids][: len(trajectory.response_ids)]
        assert list(trajectory.response_ids) == sampled
        assert trajectory.response_mask == (1,) * len(sampled)
    assert [(claim.answer, claim.accepted) for claim in episode.claims] == [("24", False), ("25", True)]


@pytest.mark.parametrize(
    ("checks", "own"),
    [
        ([("25", 4)], {"writer": 1.0, "verifier": 1.0}),
        ([("24", 4)], {"writer": 0.0, "verifier": 0.0}),
        ([("24", 1), ("25", 4)], {"writer": 0.5, "verifier": 1.0}),
        ([("25", 2), ("25", 4)], {"writer": 1.0, "verifier": 0.5}),
    ],
)
async def test_writer_and_verifier_have_verdicts_of_their_own(
    team: Path, codec: ChatTokenizer, checks: list[tuple[str, int]], own: dict[str, float]
) -> None:
    again = [CALL | {"argument": "print(25)"}, LOOK, FOUND]
    script = [*WORK, *wrote(*checks[0]), *[each for check in checks[1:] for each in (*again, *wrote(*check))]]
    episode = await play(team, codec, script)
    assert await member_verdicts(episode, load_agent("math"), TASK, load_reward(None)) == own


async def test_a_team_without_a_usable_reply_has_given_up_and_one_that_is_late_has_no_score(
    team: Path, codec: ChatTokenizer
) -> None:
    spec, reward, settings = load_agent("math"), load_reward(None), HarnessSettings(team=team)
    lost = await play(team, codec, ["no object"] * 3)
    assert (lost.answer, lost.failure, len(lost.trajectories)) == (None, "", 3)
    assert (await judge(lost, settings, spec, TASK, reward)).score == 0
    late = await play(team, codec, [PLAN], timeout_s=1e-9)
    verdict = await judge(late, settings, spec, TASK, reward)
    assert (verdict.score, "the team did not end within" in verdict.evidence) == (None, True)


async def test_a_trained_teams_work_is_distilled_by_the_same_command(
    tmp_path: Path, team: Path, codec: ChatTokenizer
) -> None:
    file = {"harness": {"team": str(team)}, "model": "none", "agent": "math"}
    (tmp_path / "trained.yaml").write_text(yaml.safe_dump(file))
    opened = open_team(tmp_path / "trained.yaml", seed=1)
    assert isinstance(opened, TrainedTeam)
    trained = TrainedTeam(opened._policy, opened.spec, 1, model_of(codec, [*WORK, *wrote("25", 4)]))
    tools: dict[str, Tool] = load_tools(trained.settings.tools)
    summary = await distill(
        [TASK], trained.spec, tools, tmp_path / "out", team=trained, seed=1, max_parallel=1
    )
    assert (summary.kept, summary.tool_calls) == (1, 1), summary.examples
    [record] = read_records(tmp_path / "out/trajectories.jsonl")
    assert record.answer == "25"
    assert [(call.argument.strip(), call.observation) for call in record.calls] == [
        ("```py\nprint(12+13)\n```", "25")
    ]


def test_a_program_and_a_team_are_two_things(team: Path) -> None:
    for wrong in ({}, {"team": str(team), "command": ["python"]}, {"team": str(team), "sandbox": True}):
        with pytest.raises(ValueError, match=r"exactly one of `command`|not supported for a team"):
            HarnessSettings.model_validate(wrong)
    with pytest.raises(ConfigError, match="team"):
        TeamRunner(HarnessSettings(team=team.with_name("none.yaml")), load_agent("math"))


def test_a_tools_file_without_a_members_tool_is_refused_before_the_team_works(team: Path) -> None:
    entry = {"class_name": "calculator.Calculator", "tool_schema": {"function": {"name": "coder"}}}
    (team.parent / "other_tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    other = team.with_name("other.yaml")
    other.write_text(f"extends: {team.name}\ntools: other_tools.yaml\n")
    expected = r"other.yaml: the team calls code, but `tools` has coder; did you mean 'coder'\?"
    with pytest.raises(ConfigError, match=expected):
        TeamRunner(HarnessSettings(team=other), load_agent("math"))
