"""``afm data negative`` as a person runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from afm.trajectory.record import Record, TextSegment

ROOT = Path(__file__).parents[2]
CALLED = (
    ("<plan>P.</plan><think>Run it.</think><code>\n```py\nprint(2)\n```\n</code>", "agent"),
    ("\n<observation>\n2\n</observation>\n", "environment"),
    ("<reflection>Good.</reflection><think>So.</think><answer>\\boxed{2}</answer>", "agent"),
)


def afm(*words):
    command = [sys.executable, "-m", "afm.cli.main", "data", "negative", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr.strip()


@pytest.fixture
def given(tmp_path):
    folder = tmp_path / "with blanks"
    folder.mkdir()
    parts = tuple(TextSegment(author=author, text=text) for text, author in CALLED)
    rows = [
        Record(id=f"c{i}", agent="math", agent_digest="d", question=f"{i}?", segments=parts)
        for i in range(10)
    ]
    (folder / "records.jsonl").write_text("".join(f"{row.model_dump_json()}\n" for row in rows))
    chat = [{"question": f"Q{i}?", "answer": f"A{i}"} for i in range(3)]
    (folder / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in chat))
    return folder


def test_counts_of_every_kind_are_told(given):
    words = [given / "records.jsonl", "--out", given / "out", "--general", given / "chat.jsonl"]
    status, said, _ = afm(*words, "--ratio", "absent_not_needed=0.5", "--ratio", "present_needed=0.4")
    assert status == 0
    assert said.splitlines() == [
        f"{given}/out/negative_agent_sft.json: 9 rows",
        "  absent_not_needed: 3, 5 wanted: the sources hold no more",
        "  absent_needed: 1",
        "  present_not_needed: 1",
        "  present_needed: 4",
    ]
    first = (given / "out/negative_agent_sft.json").read_bytes()
    assert afm(*words, "--ratio", "absent_not_needed=0.5", "--ratio", "present_needed=0.4")[0] == 0
    assert (given / "out/negative_agent_sft.json").read_bytes() == first
    assert afm(*words, "--ratio", "present_needed=0.4", "--seed", "5")[0] == 0
    assert (given / "out/negative_agent_sft.json").read_bytes() != first


def test_options_change_what_is_answered(given):
    words = [
        given / "records.jsonl",
        "--out",
        given / "out",
        "--general",
        given / "chat.jsonl",
        "--name",
        "n",
    ]
    assert afm(*words, "--absent", "explain", "--direct", "plain")[0] == 0
    rows = {row["extra_info"]["kind"]: row for row in json.loads((given / "out/n.json").read_text())}
    assert rows["absent_needed"]["extra_info"]["answer_from"] == "rule"
    assert rows["present_not_needed"]["output"] in ("A0", "A1", "A2")


def test_bad_rows_are_named_and_dropped_on_demand(given):
    with (given / "records.jsonl").open("a") as file:
        file.write('{"id": 1}\n')
    words = [given / "records.jsonl", "--out", given / "out", "--general", given / "chat.jsonl"]
    status, _, said = afm(*words)
    assert status == 1
    assert f"{given}/records.jsonl:11: " in said
    assert not (given / "out/negative_agent_sft.json").exists()
    status, said, _ = afm(*words, "--on-bad-rows", "drop")
    assert status == 0
    assert f"  bad rows: 1 left out; listed in {given}/out/negative_agent_sft.bad_rows.jsonl" in said


def test_without_questions_that_need_no_tool_it_says_what_to_give(given):
    status, _, said = afm(given / "records.jsonl", "--out", given / "out")
    assert status == 1
    assert "nothing to make absent_not_needed from" in said
    assert "--general FILE; or set its ratio to 0" in said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--ratio", "absent=1"], "--ratio absent=1: did you mean 'absent_needed'?"),
        (["--ratio", "absent_needed=x"], "--ratio absent_needed=x: expected a number"),
        (["--agent", "nobody"], "--agent nobody"),
    ],
)
def test_wrong_usage_is_refused(given, words, complaint):
    status, _, said = afm(given / "records.jsonl", "--out", given / "out", *words)
    assert status == 2
    assert complaint in said
