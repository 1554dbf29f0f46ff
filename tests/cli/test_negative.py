import json

import pytest

from afm.agents import load_agent, save_agent
from afm.trajectory.record import Record
from afm.trajectory.tags import Author, Segment

CALLED = (
    ("<plan>P.</plan><think>Run it.</think><code>\n```py\nprint(2)\n```\n</code>", "agent"),
    ("\n<observation>\n2\n</observation>\n", "environment"),
    ("<reflection>Good.</reflection><think>So.</think><answer>\\boxed{2}</answer>", "agent"),
)


@pytest.fixture
def negative(afm):
    """Runs the command; its status, output and error."""

    def run(*words):
        done = afm("data", "negative", *words, status=None)
        return done.returncode, done.stdout, done.stderr.strip()

    return run


@pytest.fixture
def given(tmp_path):
    folder = tmp_path / "with blanks"
    folder.mkdir()
    parts = tuple(Segment(Author(author), text) for text, author in CALLED)
    rows = [
        Record(id=f"c{i}", agent="math", agent_digest="d", question=f"{i}?", segments=parts)
        for i in range(10)
    ]
    (folder / "records.jsonl").write_text("".join(f"{row.model_dump_json()}\n" for row in rows))
    chat = [{"question": f"Q{i}?", "answer": f"A{i}"} for i in range(3)]
    (folder / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in chat))
    return folder


def test_counts_of_every_kind_are_told(negative, given):
    words = [given / "records.jsonl", "--output-dir", given / "out", "--general", given / "chat.jsonl"]
    ratios = ["--ratio", "absent_not_needed=0.5", "--ratio", "present_needed=0.4"]
    status, said, _ = negative(*words, *ratios)
    assert status == 0
    assert said.splitlines() == [
        f"{given}/out/negative_agent_sft.json: 9 rows",
        "  absent_not_needed: 3, 5 wanted: the sources hold no more",
        "  absent_needed: 1",
        "  present_not_needed: 1",
        "  present_needed: 4",
    ]


def test_options_change_what_is_answered(negative, given):
    words = [given / "records.jsonl", "--output-dir", given / "out", "--general", given / "chat.jsonl"]
    assert negative(*words, "--name", "n", "--absent", "explain", "--direct", "plain")[0] == 0
    rows = {row["extra_info"]["kind"]: row for row in json.loads((given / "out/n.json").read_text())}
    assert rows["absent_needed"]["extra_info"]["answer_from"] == "rule"
    assert rows["present_not_needed"]["output"] in ("A0", "A1", "A2")


def test_the_agent_is_the_one_of_the_rows(negative, given):
    rows = given / "records.jsonl"
    rows.write_text(rows.read_text().replace('"agent":"math"', '"agent":"helper"'))
    save_agent(load_agent("math").model_copy(update={"name": "helper"}), given / "agent.yaml")
    words = ("--output-dir", given / "out", "--general", given / "chat.jsonl")
    assert negative(rows, *words)[0] == 0
    made = json.loads((given / "out/negative_agent_sft.json").read_text())
    assert {row["extra_info"]["agent"] for row in made} <= {"helper", "helper_without_tools", ""}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--ratio", "absent=1"], "--ratio absent=1: did you mean 'absent_needed'?"),
        (["--ratio", "absent_needed=x"], "--ratio absent_needed=x: expected a number"),
        (["--agent", "nobody"], "--agent nobody"),
    ],
)
def test_wrong_usage_is_refused(negative, given, words, complaint):
    status, _, said = negative(given / "records.jsonl", "--output-dir", given / "out", *words)
    assert status == 2
    assert complaint in said
