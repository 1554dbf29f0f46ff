"""Rows that cannot be trained on are named with file, line and reason, and never lost in silence."""

import json

import pytest

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
    json.dumps({"instruction": "Last?", "output": SAID, "system": "Be brief."}),
]
REASONS = {
    2: "no JSON: Expecting value",
    4: "<observation> opened at character 0 is never closed",
    5: "no key 'output' among",
    6: "output: got int, expected a text",
    7: "got list, expected an object",
    8: "got no question, expected a text under 'instruction'",
    9: "nothing to train on: no token of the agent is left within cutoff_len=100",
    10: "the response is empty",
}


@pytest.fixture
def folder(data_dir):
    made = data_dir([], name="rows.jsonl")
    (made / "rows.jsonl").write_text("\n".join(LINES) + "\n")
    return made


def listed(folder):
    lines = (folder / "out/bad_rows.jsonl").read_text("utf-8").splitlines()
    return {line["line"]: line["reason"] for line in map(json.loads, lines)}


def test_bad_rows_stop_the_training_and_all_are_listed(pipeline, folder, tiny):
    with pytest.raises(DataError) as caught:
        pipeline(tiny, folder, cutoff_len=100)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{folder}/rows.jsonl:2: no JSON")
    assert lines[-1] == f"... and 2 more rows, all listed in {folder}/out/bad_rows.jsonl"
    assert sorted(listed(folder)) == [2, 4, 5, 6, 7, 8, 10]


@pytest.mark.parametrize("packing", [{}, {"packing": True}, {"neat_packing": True}])
def test_dropped_rows_are_listed_and_the_others_trained_on(pipeline, folder, tiny, capsys, packing):
    for _ in range(2):  # from the cache, too
        built = pipeline(tiny, folder, cutoff_len=100, on_bad_rows="drop", **packing)
        assert "".join(built.trained()) == f"{SAID}<|im_end|>" * 2
        assert "Be brief." in "".join(built.masked())
        reasons = listed(folder)
        assert sorted(reasons) == sorted(REASONS)
        assert all(reasons[line].startswith(reason) for line, reason in REASONS.items())
        assert "bad rows: 7 left out" in capsys.readouterr().err


def test_streamed_rows_are_dropped_with_a_word(pipeline, folder, tiny, capsys):
    options = {"streaming": True, "dataloader_num_workers": 1, "on_bad_rows": "drop", "cutoff_len": 100}
    assert len(pipeline(tiny, folder, **options).rows) == 2
    assert f"bad row left out: {folder}/rows.jsonl:9 ('Cut off?'): nothing" in capsys.readouterr().err


def test_a_broken_array_is_refused_since_its_rows_cannot_be_counted(pipeline, data_dir, tiny):
    folder = data_dir([])
    (folder / "rows.json").write_text(f"[\n{json.dumps(GOOD)},\n{{,\n{json.dumps(GOOD)}\n]\n")
    with pytest.raises(DataError, match=r"rows.json:3: no JSON from here on"):
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
