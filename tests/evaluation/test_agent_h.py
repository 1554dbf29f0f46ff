"""Agent-H: rows of function calling in four circumstances, asked over HTTP, and figures worked out by hand."""

import json
from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.errors import ConfigError, DataError
from afm.evaluation import summarise
from afm.evaluation.config import load_config
from afm.evaluation.job import read_benchmark
from afm.rewards import Sample, load_reward
from afm.trajectory.tags import Author, Segment

ROOT = Path(__file__).resolve().parents[2]
CHAT = load_agent("configs/eval/agents/chat.yaml")
FUNCTIONS = '{\n  "name": "turn_lamp",\n  "parameters": {"type": "object"}\n}\n\n{"name": "blow_horn", "parameters": {}}'


def row(asked, answer, functions=FUNCTIONS):
    return {
        "system": f"SYSTEM: You keep a lighthouse. {functions}",
        "chat": f"USER: {asked}\n\n\nASSISTANT: {answer} <|endoftext|>\n\n\nUSER: Thanks\n\n\nASSISTANT: Bye <|endoftext|>",
    }


ROWS = [
    row("Turn the lamp.", """<functioncall> {"name": "turn_lamp", "arguments": '{"side": "north"}'}"""),
    row("Who built lighthouses?", "Engineers did."),
    row("What is fog?", "A low cloud.", functions=""),
]
CASES = ["given_asked", "absent_asked", "given_not_asked", "absent_not_asked"]


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(ROWS))
    return file


def test_a_row_is_asked_with_its_functions_and_one_that_needs_them_also_without(data) -> None:
    tasks = list(read_benchmark(data, reader="glaive"))
    assert [task.data_source for task in tasks] == [f"agent_h_{case}" for case in CASES]
    given, without, other, absent = tasks
    assert given.ground_truth == "turn_lamp"
    assert [message["role"] for message in given.prompt] == ["system", "user"]
    assert given.prompt[0]["content"] == f"You keep a lighthouse. {FUNCTIONS}"
    assert without.prompt == ({"role": "user", "content": "Turn the lamp."},)
    assert given.extra_info["agent_h"] == {"tools": ["turn_lamp", "blow_horn"], "asked": True}
    assert (other.question, other.ground_truth) == ("Who built lighthouses?", "Engineers did.")
    assert absent.extra_info["agent_h"]["tools"] == []
    assert len({task.id for task in tasks}) == 4


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"system": "SYSTEM: x", "chat": "Hello"}, "expected texts after `USER:` and `ASSISTANT:`"),
        (
            {"system": "SYSTEM: x", "chat": "USER: \n\n\nASSISTANT: a"},
            "expected texts after `USER:` and `ASSISTANT:`",
        ),
        ({"chat": "USER: a\n\n\nASSISTANT: b"}, "`system`: expected a text"),
        (row("Boil tea.", '<functioncall> {"name": "kettle"}'), "calls none of the functions"),
    ],
)
def test_rows_of_another_form_are_refused(bad, message, tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(bad))
    with pytest.raises(DataError, match=message) as caught:
        list(read_benchmark(file, reader="glaive"))
    assert f"{file}:1" in str(caught.value)


@pytest.mark.parametrize(
    ("reply", "case", "expected"),
    [
        ("Engineers did.", "given_not_asked", (1.0, 1.0)),
        ("Thought: easy.\nAction: none", "given_not_asked", (0.5, 1.0)),
        ("I will use turn_lamp. Thought: done", "given_not_asked", (0.0, 1.0)),
        ("I need to call for help.", "absent_not_asked", (0.5, 1.0)),
        ('{"name": "turn_lamp", "arguments": {}}', "absent_asked", (1.0, 0.0)),
        ("Action: boil_tea\nAction Input: {}", "given_not_asked", (0.5, 0.0)),
        ("<tool_call>x</tool_call>", "absent_asked", (1.0, 0.0)),
        ("""<functioncall> {"name": "turn_lamp", "arguments": '{}'}""", "given_asked", (1.0, 1.0)),
        ("Action: turn_lamp\nAction Input: {}", "given_asked", (1.0, 1.0)),
        ('{"name": "blow_horn", "arguments": {}}', "given_asked", (0.0, 1.0)),
        ("I turn it.", "given_asked", (0.0, 1.0)),
    ],
)
async def test_replies_by_circumstance(data, reply, case, expected) -> None:
    tasks = {task.data_source: task for task in read_benchmark(data, reader="glaive")}
    task = tasks[f"agent_h_{case}"]
    segments = (Segment(Author.AGENT, reply), Segment(Author.ENVIRONMENT, "Thought: I will use it"))
    sample = Sample(CHAT, task.data_source, "q", segments, task.ground_truth, extra_info=task.extra_info)
    reward = load_reward({"formula": "correct"})
    verdict = await reward.score(sample)
    await reward.close()
    assert (verdict.score, verdict.parts["format"]) == expected


def test_figures_are_the_papers_shares_over_replies_that_should_be_plain(record) -> None:
    said = {
        "absent_asked": ["Thought: a", "plain", "I will use x", "Action: b. I need to call it"],
        "given_not_asked": ["plain", "plain"],
        "given_asked": ["Thought: I will use it", "Action: turn_lamp"],
    }
    rows = [
        record(f"{case}{n}", float(n == 1), text=text, source=f"agent_h_{case}")
        for case, texts in said.items()
        for n, text in enumerate(texts)
    ]
    metrics = summarise(rows, spec=CHAT)
    # 2 of 6 with a keyword of ReAct, 2 of 6 with a plain one.
    figures = {"h_react": 2 / 6, "h_general": 2 / 6, "h_score": 4 / 6, "invented_tool": 0.0}
    assert metrics.agent_h == pytest.approx({**figures, "called_when_asked": 1 / 2})
    assert metrics.tool_format_without_tool is None, "the chats bring tools of their own"
    assert summarise([record("a", 1.0, text="x")], spec=CHAT).agent_h == {}


def test_the_command_reports_the_paper_figures(data, asked_chats) -> None:
    said = {
        "agent_h_given_asked": '{"name": "turn_lamp", "arguments": {"side": "north"}}',
        "agent_h_absent_asked": "Thought: I need a lamp.\nAction: turn_lamp\nAction Input: {}",
        "agent_h_given_not_asked": "Engineers did.",
        "agent_h_absent_not_asked": "A low cloud.",
    }
    tasks = list(read_benchmark(data, reader="glaive"))
    _, printed, page = asked_chats("hallucination", data, tasks, lambda task: said[task.data_source])
    line = (
        "Agent-H: H_ReAct 33.3 %, H_General 0.0 %, H_Score 83.3 %, calls of tools that were not offered 33.3 %, "
        "called when asked 100.0 %"
    )
    assert line in " ".join(printed.split())
    assert line in page
    assert "no tool offered" not in printed


def test_rows_that_are_chats_are_asked_as_they_are() -> None:
    config = load_config(ROOT / "configs/eval/hallucination.yaml", ["model=m", "prompt=own"])
    with pytest.raises(ConfigError, match="rows of glaive hold their own chats"):
        config.prompt_source(next(iter(config.routes())))
