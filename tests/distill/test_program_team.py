"""A program as a team: its model's words and its own tool become a trajectory of the agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from afm.datasets import Task
from afm.distill.program_team import ProgramTeam
from afm.distill.run import distill
from afm.distill.team_player import open_team
from afm.models.base import ScriptedModel
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
    assert (summary.kept, summary.tool_calls) == (1, 1), summary.example
    [record] = read_records(tmp_path / "out/trajectories.jsonl")
    assert record.text == f"{CODE}\n<observation>\n25\n</observation>\n{ANSWER}"
    assert [(call.tool, call.observation) for call in record.calls] == [("code", "25")]


async def test_a_program_that_fails_gives_no_trajectory_and_is_tried_again(
    tmp_path: Path, codec: ChatTokenizer
) -> None:
    summary = await run(tmp_path, "raise SystemExit('lost')", codec, script=[])
    assert (summary.kept, summary.team.failed) == (0, 1)
    assert "harness: the program ended with status 1: lost" in summary.example
