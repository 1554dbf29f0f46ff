"""Rows that cannot be trained on are listed with file, line and reason, and never lost silently."""

import json

import pytest
from sft_rows import bad_rows

from afm.errors import DataError

SAID = "<answer>42</answer>"
GOOD = {"instruction": "Good?", "input": "", "output": SAID}
LINES = [
    json.dumps(GOOD),
    '{"instruction": "Cut?", "output": ',
    "",
    json.dumps({**GOOD, "output": "<observation>"}),
    json.dumps({"instruction": "None?", "input": ""}),
    json.dumps({**GOOD, "output": 7}),
    json.dumps([1]),
    json.dumps({**GOOD, "instruction": ""}),
    json.dumps({"instruction": "Cut off?", "output": f"<observation>{'42 ' * 200}</observation>{SAID}"}),
    json.dumps({**GOOD, "output": ""}),
    json.dumps({**GOOD, "output": " \n<observation>1</observation>\n\t"}),
    json.dumps({**GOOD, "output": "\ud83d"}),
    json.dumps({**GOOD, "system": {"text": "Be brief."}}),
    json.dumps({**GOOD, "output": "<Observation>1</Observation>"}),
    json.dumps({"instruction": "Last?", "output": SAID, "system": "Be brief."}),
]
REASONS = {
    2: "invalid JSON: Expecting value",
    4: "<observation> opened at character 0 is never closed",
    5: "no key 'output' among",
    6: "output: got number, expected a text",
    7: "got list, expected an object",
    8: "got no question, expected a text under 'instruction'",
    9: "nothing to train on: no token of the agent is left within cutoff_len=100",
    10: "the response is empty",
    11: "the response is empty, or has only observations and blanks",
    12: "half a character",
    13: "system: got object, expected a text",
    14: "<Observation> at character 0: expected <observation>",
}


@pytest.fixture
def folder(data_dir):
    made = data_dir([], name="rows.jsonl")
    (made / "rows.jsonl").write_text("\n".join(LINES) + "\n")
    return made


def listed(folder):
    return {row["line"]: row["reason"] for row in bad_rows(folder)}


def test_bad_rows_stop_the_training_and_all_are_listed(pipeline, folder, tiny):
    with pytest.raises(DataError) as caught:
        pipeline(tiny, folder, cutoff_len=100)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{folder}/rows.jsonl:2: invalid JSON")
    assert len(lines) == 11, "each is of a kind of its own"
    assert sorted(listed(folder)) == [2, 4, 5, 6, 7, 8, *range(10, 15)]


@pytest.mark.parametrize("packing", [{}, {"packing": True}, {"neat_packing": True}])
def test_dropped_rows_are_listed_and_the_others_trained_on(pipeline, folder, tiny, capsys, packing):
    for _ in range(2):  # the second time from the cache
        built = pipeline(tiny, folder, cutoff_len=100, on_bad_rows="drop", **packing)
        assert "".join(built.trained()) == f"{SAID}<|im_end|>" * 2
        assert "Be brief." in "".join(built.masked())
        reasons = listed(folder)
        assert sorted(reasons) == sorted(REASONS)
        assert all(reasons[line].startswith(reason) for line, reason in REASONS.items())
        assert "bad rows: 11 left out" in capsys.readouterr().err


def test_a_broken_array_is_refused_since_its_rows_cannot_be_counted(pipeline, data_dir, tiny):
    folder = data_dir([])
    (folder / "rows.json").write_text(f"[\n{json.dumps(GOOD)},\n{{,\n{json.dumps(GOOD)}\n]\n")
    with pytest.raises(DataError, match=r"rows.json:3: invalid JSON from here on"):
        pipeline(tiny, folder, on_bad_rows="drop")


def test_no_row_left_is_an_error_even_when_bad_rows_may_be_dropped(pipeline, data_dir, tiny):
    folder = data_dir([{**GOOD, "output": "</observation>"}])
    with pytest.raises(DataError, match=r"no row is left; .*rows.json:1, row 1 .*closes nothing"):
        pipeline(tiny, folder, on_bad_rows="drop")


def test_rows_that_are_no_json_file_are_named_by_their_number(pipeline, data_dir, tiny):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    folder = data_dir([], name="rows.parquet")
    rows = [GOOD, {**GOOD, "output": "<observation>"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet, row 2 \('Good\?'\): <observation> opened"):
        pipeline(tiny, folder)


def test_a_changed_file_is_read_anew(pipeline, data_dir, tiny):
    assert pipeline(tiny, data_dir([GOOD])).trained() == [f"{SAID}<|im_end|>"]
    assert pipeline(tiny, data_dir([GOOD, GOOD])).trained() == [f"{SAID}<|im_end|>"] * 2


COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}


def reasons(pipeline, folder, tiny):
    """Return the reason and question of each bad row, by its number."""
    with pytest.raises(DataError, match=r"rows.json:1, row "):
        pipeline(tiny, folder)
    return {row["row"]: (row["reason"], row["question"]) for row in bad_rows(folder)}


def test_histories_and_tools_of_another_form_are_named(pipeline, data_dir, tiny):
    pairs = "expected pairs of a question and an answer"
    changes = [
        ({"history": {"a": "b"}}, f"history: got {{'a': 'b'}}, {pairs}"),
        ({"history": ["ab", "cd"]}, f"history: got ab, {pairs}"),
        ({"history": [["a", None]]}, f"history: got ['a', None], {pairs}"),
        ({"tools": "not JSON"}, "tools: invalid JSON: Expecting value: line 1 column 1 (char 0)"),
        ({"tools": {"name": "w"}}, "tools: got {'name': 'w'}, expected a list of objects"),
    ]
    good = {**GOOD, "history": [["a", "b"]], "tools": "[]"}
    columns = COLUMNS | {"tools": "tools", "history": "history"}
    folder = data_dir([good, *({**good, **change} for change, _ in changes)], columns=columns)
    expected = {number: (reason, "Good?") for number, (_, reason) in enumerate(changes, start=2)}
    assert reasons(pipeline, folder, tiny) == expected


CALL = '{"name": "w", "arguments": {}}'


def test_calls_and_flags_of_another_form_are_named(pipeline, data_dir, tiny):
    template = "the chat template cannot write it: "
    changes = {
        2: ({"value": "w()"}, f"{template}RuntimeError: Invalid JSON format in function"),
        3: ({"value": '{"arguments": {}}'}, f"{template}KeyError: 'name'"),
        4: ({"value": "5"}, f"{template}TypeError"),
        5: ({"loss": "false"}, "conversations[1]: loss: got 'false', expected true or false"),
    }
    rows = []
    for change in ({}, *(change for change, _ in changes.values())):
        call = {"from": "function_call", "value": CALL, **change}
        rows.append({"conversations": [{"from": "human", "value": "Rain?"}, call]})
    folder = data_dir(rows, formatting="sharegpt")
    assert reasons(pipeline, folder, tiny) == {5: (changes[5][1], "Rain?")}
    built = pipeline(tiny, folder, on_bad_rows="drop")
    assert len(built.rows) == 1
    found = {row["row"]: row["reason"] for row in bad_rows(folder)}
    assert sorted(found) == sorted(changes)
    assert all(reason.startswith(changes[number][1]) for number, reason in found.items())


def test_a_file_without_rows_is_named(pipeline, data_dir, tiny):
    folder = data_dir([])
    for text in ("", "[]", "\n \n"):
        (folder / "rows.json").write_text(text)
        with pytest.raises(DataError, match=r"rows.json: has no rows"):
            pipeline(tiny, folder)
