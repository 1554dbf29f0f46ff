from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from afm.agents import load_agent, save_agent
from afm.errors import ConfigError, DataError, UsageError
from afm.trajectory import Author, Record, Segment
from afm.trajectory.record import TextSegment
from afm.trajectory.rows import TrajectoryRow, read_rows

CALL, SEEN = "<plan>p</plan><think>t</think><code>1</code>", "\n<observation>\n1\n</observation>\n"
EXPECTED = (Segment(Author.AGENT, CALL), Segment(Author.ENVIRONMENT, SEEN))


def alpaca(**changes: Any) -> dict[str, Any]:
    return {"instruction": "1?", "input": "", "output": CALL + SEEN} | changes


def record(agent: str = "math") -> Record:
    segments = (
        TextSegment(author=Author.AGENT, text=CALL),
        TextSegment(author=Author.ENVIRONMENT, text=SEEN),
    )
    return Record(id="r1", agent=agent, agent_digest="0" * 16, question="1?", segments=segments)


def rows(path: Path, agent: str | None = None) -> list[TrajectoryRow]:
    found = list(read_rows(path, agent))
    assert all(isinstance(row, TrajectoryRow) for row in found), found
    return [row for row in found if isinstance(row, TrajectoryRow)]


def faults(path: Path, agent: str | None = "math") -> list[str]:
    return [str(row).removeprefix(str(path)) for row in read_rows(path, agent) if isinstance(row, DataError)]


def test_record_lines_keep_their_authors_and_name_their_agent(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(record().model_dump_json() + "\n", encoding="utf-8")
    assert rows(path) == [TrajectoryRow("r1", 1, load_agent("math"), EXPECTED)]


def test_given_agent_overrides_the_named_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(record().model_dump_json() + "\n", encoding="utf-8")
    assert [row.spec.name for row in rows(path, "code")] == ["code"]


def test_agent_beside_the_file_is_used_for_its_name(tmp_path: Path) -> None:
    tiny = load_agent(Path(__file__).parents[2] / "configs/tiny/agents/math.yaml")
    save_agent(tiny, tmp_path / "agent.yaml")
    path = tmp_path / "rows.jsonl"
    path.write_text(record().model_dump_json() + "\n", encoding="utf-8")
    assert [row.spec for row in rows(path)] == [tiny]


def test_alpaca_lines_get_their_authors_from_the_tags(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(alpaca()) + "\n\n" + json.dumps(alpaca(id="x")) + "\n", encoding="utf-8")
    assert [(row.id, row.line, row.segments) for row in rows(path, "math")] == [
        ("1", 1, EXPECTED),
        ("x", 3, EXPECTED),
    ]


@pytest.mark.parametrize(("indent", "lines"), [(None, [1, 1]), (2, [2, 7])])
def test_alpaca_array_reports_the_line_of_each_row(
    tmp_path: Path, indent: int | None, lines: list[int]
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([alpaca(), alpaca()], indent=indent), encoding="utf-8")
    assert [(row.line, row.segments) for row in rows(path, "math")] == [(line, EXPECTED) for line in lines]


@pytest.mark.parametrize("text", ["[]", "[ ]\n", ""])
def test_empty_files_have_no_rows(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text, encoding="utf-8")
    assert rows(path, "math") == []


def test_alpaca_without_agent_asks_for_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(alpaca()) + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match="give --agent NAME"):
        list(read_rows(path))


def test_bad_lines_are_reported_and_the_good_ones_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps(alpaca())
    lines = [good, "{oops", "3", '{"text": "x"}', '{"segments": []}', json.dumps(alpaca(output=3)), good]
    path.write_text("\n".join(lines), encoding="utf-8")
    messages = faults(path)
    assert [message.split(": ")[0] for message in messages] == [":2", ":3", ":4", ":5", ":6"]
    assert "no JSON" in messages[0]
    assert "got int, expected an object" in messages[1]
    assert "got the keys ['text'], expected a trajectory record or an alpaca row" in messages[2]
    assert ":5: id: got" in messages[3]
    assert len([row for row in read_rows(path, "math") if isinstance(row, TrajectoryRow)]) == 2


def test_unknown_agent_of_a_record_is_that_rows_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        record("mth").model_dump_json() + "\n" + record().model_dump_json() + "\n", encoding="utf-8"
    )
    found = list(read_rows(path))
    assert str(found[0]).startswith(f"{path}:1: agent 'mth' is not shipped")
    assert isinstance(found[1], TrajectoryRow)


def test_unknown_agent_on_the_command_line_is_an_error_of_the_call(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="did you mean 'math'"):
        list(read_rows(path, "mth"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[3]", ":1: got int, expected an object"),
        ("[\n{,", ":2: no JSON from here on"),
        ('[\n{"a": 1},\n', ":3: the JSON array is never closed"),
        ('[\n{"a": 1}\n]\n[{"a": 2}]', ":3: the JSON array ends here, but the file goes on"),
    ],
)
def test_broken_arrays_say_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text, encoding="utf-8")
    assert faults(path)[-1].startswith(message)
