"""A program as a team: its model's words and its own tool become a trajectory of the agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from afm.agents import load_agent
from afm.datasets import Task
from afm.distill.program_team import ProgramTeam, write_down
from afm.distill.run import distill
from afm.distill.team_player import open_team
from afm.harness import Branch, Sampled
from afm.harness.episode import HarnessEpisode, OwnVerdict
from afm.harness.history import SampledTurn
from afm.models.base import FinishReason, ScriptedModel
from afm.models.tiny import train_tokenizer
from afm.models.tokenizer import ChatTokenizer

pytestmark = pytest.mark.slow

CODE = "<plan>Run it.</plan><think>12+13.</think><code>\n```py\nprint(12+13)\n```\n</code>"
ANSWER = "<reflection>25.</reflection><think>Done.</think><answer>\\boxed{25}</answer>"
PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def ask(path, **body):
    url = os.environ["OPENAI_BASE_URL"] + path
    data = json.dumps({"model": os.environ["AFM_MODEL"], "max_tokens": 200, **body}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as reply:
        return json.load(reply)["choices"][0]
"""
COMPLETIONS = """
text = task["messages"][0]["content"]
for more in ("\\n<observation>\\n25\\n</observation>\\n", ""):
    text += ask("/completions", prompt=text, include_stop_str_in_output=True, stop=["</code>"])["text"] + more
print(25)
"""
CHAT = """
messages = task["messages"]
for more in ("25", ""):
    messages = [*messages, ask("/chat/completions", messages=messages, stop=["</code>"])["message"]]
    messages[-1]["content"] += "</code>" if "<code>" in messages[-1]["content"] else ""
    messages += [{"role": "user", "content": more}] if more else []
print(25)
"""


class Events:
    """Takes the events of an attempt in place of a log."""

    def __init__(self) -> None:
        self.results: list[tuple[str, str, str]] = []

    def observe(self, member: str, tool: str, argument: str, text: str) -> None:
        self.results.append((tool, argument, text))

    def call(self, *_: object, **__: object) -> None: ...

    say = finish = call


@pytest.mark.parametrize("ids", [("c1", "c2"), ("", "")], ids=["by id", "without ids by order"])
def test_results_of_parallel_calls_belong_to_the_calls_of_their_ids(ids: tuple[str, str]) -> None:
    """Programs that run calls at the same time send each result when it is there."""
    calls = [
        {"id": identity, "function": {"name": "search", "arguments": json.dumps({"query": query})}}
        for identity, query in zip(ids, ("Ilm", "Elbe"), strict=True)
    ]
    late, early = ids
    messages = (
        {"role": "user", "content": "Which is longer?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": early, "content": "1,094 km"},
        {"role": "tool", "tool_call_id": late, "content": "131 km"},
        {"role": "assistant", "content": "The Elbe."},
    )
    turns = (SampledTurn(0, 1, 0, FinishReason.END_OF_TEXT, True),)
    trajectory = Sampled("0", Branch.FIRST, "", (1,), (2,), (1,), (), turns, messages)
    events: Any = Events()
    write_down(
        HarnessEpisode((trajectory,), OwnVerdict(), "Elbe", ""),
        load_agent("math"),
        ScriptedModel([]),
        events,
    )
    expected = [("search", "Elbe", "1,094 km"), ("search", "Ilm", "131 km")]
    assert events.results == (
        expected if early else [("search", "Ilm", "1,094 km"), ("search", "Elbe", "131 km")]
    )


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([CODE, ANSWER] * 5, folder, vocab_size=300)
    return ChatTokenizer.load(folder)


async def run(tmp_path: Path, program: str, codec: ChatTokenizer, *, script: list[str]) -> Any:
    (tmp_path / "program.py").write_text(PROGRAM + program)
    file = {"harness": {"command": ["python", "program.py"], "retries": 0}, "model": "none", "agent": "math"}
    (tmp_path / "team.yaml").write_text(yaml.safe_dump(file))
    opened = open_team(tmp_path / "team.yaml", seed=1)
    assert isinstance(opened, ProgramTeam)
    team = ProgramTeam(opened.settings, opened.spec, 1, ScriptedModel(script, codec, context_tokens=2000))
    try:
        task = Task(id="q", question="12+13?", data_source="mini_math", ground_truth="25")
        return await distill([task], opened.spec, {}, tmp_path / "out", team=team, seed=1, max_parallel=1)
    finally:
        await team.close()


@pytest.mark.parametrize("program", [COMPLETIONS, CHAT], ids=["completions", "chat"])
async def test_a_program_that_uses_a_tool_of_its_own_gives_a_kept_trajectory(
    tmp_path: Path, codec: ChatTokenizer, program: str
) -> None:
    from afm.trajectory import read_records

    summary = await run(tmp_path, program, codec, script=[CODE, ANSWER])
    assert (summary.kept, summary.tool_calls) == (1, 1), summary.examples
    [record] = read_records(tmp_path / "out/trajectories.jsonl")
    assert record.text == f"{CODE}\n<observation>\n25\n</observation>\n{ANSWER}"
    assert [(call.tool, call.observation) for call in record.calls] == [("code", "25")]


async def test_a_program_that_fails_gives_no_trajectory_and_is_tried_again(
    tmp_path: Path, codec: ChatTokenizer
) -> None:
    summary = await run(tmp_path, "raise SystemExit('lost')", codec, script=[])
    assert (summary.kept, summary.team.failed) == (0, 1)
    assert "harness: the program ended with status 1: lost" in str(summary.examples)
