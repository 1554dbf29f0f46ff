from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from afm.agents import load_agent, save_agent
from afm.errors import ConfigError, DataError, UsageError
from afm.trajectory import Author, Record, Segment
from afm.trajectory.convert import TrajectoryRow, read_rows
from afm.trajectory.io import json_rows

CALL, SEEN = "<plan>p</plan><think>t</think><code>1</code>", "\n<observation>\n1\n</observation>\n"
EXPECTED = (Segment(Author.AGENT, CALL), Segment(Author.ENVIRONMENT, SEEN))


def alpaca(**changes: Any) -> dict[str, Any]:
    return {"instruction": "1?", "input": "", "output": CALL + SEEN} | changes


def record(agent: str = "math") -> Record:
    segments = EXPECTED
    return Record(id="r1", agent=agent, agent_digest="0" * 16, question="1?", segments=segments)


def rows(path: Path, agent: str | None = None) -> list[TrajectoryRow]:
    found = list(read_rows(path, agent))
    assert all(isinstance(row, TrajectoryRow) for row in found), found
    return [row for row in found if isinstance(row, TrajectoryRow)]


def faults(path: Path, agent: str | None = "math") -> list[str]:
    return [str(row).removeprefix(str(path)) for row in read_rows(path, agent) if isinstance(row, DataError)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.json"


def test_record_lines_keep_their_authors_and_an_agent_asked_for_or_beside_the_file_wins(path: Path) -> None:
    path.write_text(record().model_dump_json() + "\n", encoding="utf-8")
    assert rows(path) == [TrajectoryRow("r1", 1, load_agent("math"), EXPECTED)]
    assert [row.spec.name for row in rows(path, "code")] == ["code"]
    tiny = load_agent(Path(__file__).parents[2] / "configs/tiny/agents/math.yaml")
    save_agent(tiny, path.with_name("agent.yaml"))
    assert [row.spec for row in rows(path)] == [tiny]


LINES = f"{json.dumps(alpaca())}\n\n{json.dumps(alpaca(id='x'))}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LINES, [("1", 1), ("x", 3)]),
        (json.dumps([alpaca(), alpaca()]), [("1", 1), ("2", 1)]),
        (json.dumps([alpaca(), alpaca()], indent=2), [("1", 2), ("2", 7)]),
        *((text, []) for text in ("[]", "[ ]\n", "")),
    ],
)
def test_alpaca_rows_get_their_lines_and_their_authors_from_the_tags(
    path: Path, text: str, expected: list[tuple[str, int]]
) -> None:
    path.write_text(text, encoding="utf-8")
    assert [(row.id, row.line) for row in rows(path, "math")] == expected
    assert all(row.segments == EXPECTED for row in rows(path, "math"))


def test_alpaca_without_agent_asks_for_one(path: Path) -> None:
    path.write_text(json.dumps(alpaca()) + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match="give --agent NAME"):
        list(read_rows(path))


def test_bad_lines_are_reported_and_the_good_ones_kept(path: Path) -> None:
    good = json.dumps(alpaca())
    lines = [good, "{oops", "3", '{"text": "x"}', '{"segments": []}', json.dumps(alpaca(output=3)), good]
    path.write_text("\n".join(lines), encoding="utf-8")
    messages = faults(path)
    assert [message.split(": ")[0] for message in messages] == [":2", ":3", ":4", ":5", ":6"]
    assert "invalid JSON" in messages[0]
    assert "got number, expected an object" in messages[1]
    assert "got the keys ['text'], expected a trajectory record or an alpaca row" in messages[2]
    assert ":5: id: missing, but required (and 3 more faults)" in messages[3]
    assert len([row for row in read_rows(path, "math") if isinstance(row, TrajectoryRow)]) == 2


def test_an_unknown_agent_is_the_error_of_its_row_or_of_the_call(path: Path) -> None:
    lines = (record("mth").model_dump_json(), record().model_dump_json())
    path.write_text("\n".join(lines), encoding="utf-8")
    first, second = read_rows(path)
    assert str(first).startswith(f"{path}:1: agent 'mth' is not shipped")
    assert isinstance(second, TrajectoryRow)
    with pytest.raises(ConfigError, match="did you mean 'math'"):
        list(read_rows(path, "mth"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[3]", ":1: got number, expected an object"),
        ("[\n{,", ":2: invalid JSON from here on"),
        ('[\n{"a": 1},\n', ":3: the JSON array is never closed"),
        ('[\n{"a": 1}\n{"b": "c"', ":3: invalid JSON from here on: Expecting ',' delimiter"),
        ('[\n{"a": "b', ":2: invalid JSON from here on: Unterminated string"),
        ('[\n{"a": 1}\n]\n[{"a": 2}]', ":3: the JSON array ends here, but more text follows it"),
    ],
)
def test_broken_arrays_say_where(path: Path, text: str, message: str) -> None:
    path.write_text(text, encoding="utf-8")
    assert faults(path)[-1].startswith(message)


BOM = b"\xef\xbb\xbf"
LONG = [alpaca(output="é🙂" * length) for length in (0, 1, 40_000, 65_519, 200_000, 3)]


@pytest.mark.parametrize(
    ("indent", "before"),
    [(None, b""), (None, BOM), (2, BOM + b"\n"), (2, b"\n \r\n"), (None, b"\n" * 70_000)],
)
def test_an_array_is_one_whatever_stands_before_it_and_however_long_its_rows_are(
    path: Path, indent: int | None, before: bytes
) -> None:
    path.write_bytes(before + json.dumps(LONG, indent=indent, ensure_ascii=False).encode() + b"\r\n")
    found = list(json_rows(path))
    assert [item for _, item in found] == LONG
    step, first = (5, 2) if indent else (0, 1)
    assert [line - before.count(b"\n") for line, _ in found] == [first + step * n for n in range(len(LONG))]


def test_lines_behind_a_byte_order_mark_are_rows(path: Path) -> None:
    path.write_bytes(BOM + b'{"a": 1}\n' + b'{"a": 2}\n')
    assert list(json_rows(path)) == [(1, {"a": 1}), (2, {"a": 2})]


UTF_8 = (
    "save the file as UTF-8, for example so: iconv -f WINDOWS-1252 -t UTF-8 {0}/{1}.json > {0}/{1}_utf8.json"
)


@pytest.mark.parametrize("whole", ["%s\n%s\n%s\n", "[\n%s,\n%s,\n%s]"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'"\\ud83d"', r"half a character ('\ud83d'), expected surrogates in pairs"),
        (b'"\xff"', f"a byte that is not UTF-8 at character 7; {UTF_8}"),
        (b'"\xed\xa0\xbd"', f"a byte that is not UTF-8 at character 7; {UTF_8}"),
    ],
)
def test_a_row_that_is_no_unicode_text_is_named_and_the_others_are_read(
    path: Path, whole: str, text: bytes, message: str
) -> None:
    good, bad = b'{"a": "\\ud83d\\ude42"}', b'{"a": ' + text + b"}"
    path.write_bytes(whole.encode() % (good, bad, good))
    items = [item for _, item in json_rows(path)]
    assert items[0] == items[2] == {"a": "🙂"}
    expected = message.format(path.parent, path.stem)
    assert (items[1].message, items[1].line) == (expected, 2 + whole.startswith("["))


@pytest.mark.parametrize("array", [False, True])
def test_a_key_that_occurs_twice_in_an_object_is_a_bad_row_and_the_others_are_read(
    path: Path, array: bool
) -> None:
    long = json.dumps({"words": "x" * 200_000, "twice": [{"role": 1}]}).replace('"role"', '"role": 0, "role"')
    texts = ['{"a": 1}', '{"a": {"b": 1, "c": 2, "b": 1}}', long, '[{"a": 1}, {"a": 2}]']
    path.write_text(f"[{chr(10).join(',' + text for text in texts)[1:]}]" if array else "\n".join(texts))
    (_, first), (_, twice), (line, far), (_, last) = json_rows(path)
    assert (first, last) == ({"a": 1}, [{"a": 1}, {"a": 2}])
    assert str(twice) == f"{path}:2: the key 'b' occurs twice in one object; keep one of them"
    assert (line, str(far)) == (3, f"{path}:3: the key 'role' occurs twice in one object; keep one of them")


def test_an_array_is_read_row_by_row(path: Path) -> None:
    row = json.dumps(alpaca(output="word " * 2000))
    path.write_text("[" + ",\n".join([row] * 2000) + "]", encoding="utf-8")  # 20 MB
    tracemalloc.start()
    try:
        assert sum(1 for _ in json_rows(path)) == 2000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
