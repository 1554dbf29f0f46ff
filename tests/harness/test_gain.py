"""benchmarks/harness_gain.py and team_gain.py: demonstrations are what programs send and their model samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import harness_gain as gain
import pytest
import team_gain

from afm.cli.recipes import MATH, WIKI
from afm.datasets import Task

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "57+38"}}\n</tool_call>'
TASK = Task(
    id="q1",
    question="Tom has 57 coins. Tom finds 38 more. How many coins does Tom have?",
    ground_truth="95",
)
PACKAGES = {"langgraph": "langchain_openai", "openai_agents": "agents", "openai_agents_responses": "agents"}


@pytest.fixture
def job(tmp_path: Path) -> Callable[[str], gain.HarnessQuickstart]:
    return lambda name: gain.HarnessQuickstart(
        tmp_path, tmp_path, MATH, gain.SMOKE, 0, None, lambda *_: None, harness=gain.HARNESSES[name]
    )


def test_a_pattern_gets_the_question_expression_and_answer_of_a_task_and_calls_of_its_own(job) -> None:
    history = "Calling tools:\n[{'id': 'c0123abcd', 'arguments': '1000003*1000003'}]"
    pattern = [
        {"role": "user", "content": gain.PATTERN},
        {"role": "assistant", "content": history, "loss": False},
        {"role": "user", "content": "Observation:\n1000006000009"},
    ]
    run = job("smolagents_tools")
    calculated = next(
        TASK.model_copy(update={"id": f"q{number}"})
        for number in range(100)
        if not run._is_direct(TASK.model_copy(update={"id": f"q{number}"}))
    )
    [chat] = run._fill({"direct": [], "calculated": [pattern]}, calculated)
    assert [chat[0]["content"], chat[2]["content"]] == [TASK.question, "Observation:\n95"]
    assert chat[1]["loss"] is False
    assert (
        gain._CALL_ID.sub("ID", chat[1]["content"]) == "Calling tools:\n[{'id': 'ID', 'arguments': '57+38'}]"
    )
    assert "c0123abcd" not in chat[1]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("name", gain.HARNESSES)
async def test_an_example_program_calculates_and_answers(job, tmp_path: Path, name: str) -> None:
    """The teacher's episode, and the loss on what it said and nothing else."""
    package = PACKAGES.get(name, "smolagents" if name.startswith("smolagents") else "openai")
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install --no-deps -r requirements/frameworks.txt")
    gain.train_tokenizer(["Tom has 12 apples."], tmp_path / "teacher", vocab_size=300)
    run = job(name)
    played = await run._play([TASK], [], tmp_path / "teacher")
    chats = gain.chats_of(played["q1"], gain._tokenizer(tmp_path / "teacher"))

    assert played["q1"].answer == "95"
    said = [message["content"] for chat in chats for message in chat if message.get("loss")]
    written = run.harness.calculation.replace("%s", "57+38"), run.harness.answer.replace("%s", "95")
    assert [text.strip() for text in said] == [text.strip() for text in written]
    assert all(TASK.question in json.dumps(chat) for chat in chats)


def test_the_record_keeps_one_row_of_a_harness_and_seed(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    rows = [("script", 0, 1), ("own", 1, 2), ("script", 0, 3)]
    for harness, seed, steps in rows:
        gain.keep({"harness": harness, "seed": seed, "steps": steps}, record)
    kept = json.loads(record.read_text())["runs"]
    assert [(row["harness"], row["seed"], row["steps"]) for row in kept] == [("own", 1, 2), ("script", 0, 3)]


def test_every_system_of_a_team_is_evaluated_after_what_it_needs(tmp_path: Path) -> None:
    common = (tmp_path, tmp_path, WIKI, team_gain.QUICKSTART_SMOKE, 0, None, lambda *_: None)
    names = [stage.name for stage in team_gain.TeamQuickstart(*common).stages()]
    assert len(set(names)) == len(names)
    needs = {"eval_team": "members", "eval_team_rl": "rl_team", "eval_distilled": "sft_team"}
    assert needs.keys() | {"eval_sft", "eval_rl"} == set(team_gain.SYSTEMS.values())
    assert all(names.index(before) < names.index(name) for name, before in needs.items())
    assert names.index("rl_team") < names.index("distill_team") < names.index("sft_team")
