import datetime
import decimal
import io
import json
import struct

import pytest

from afm.agents import load_agent
from afm.datasets.published import BadRows, ReadCounts, read_published
from afm.datasets.readers import READERS
from afm.datasets.rl_files import write_rl
from afm.datasets.row_files import data_files
from afm.datasets.schema import plain_value
from afm.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def read(file):
    """Return the tasks of a file and the reasons for refused rows."""
    counts = ReadCounts()
    rows = list(read_published([file], READERS["afm_rl"], BadRows(io.StringIO()), counts, label="x"))
    assert counts.read == counts.made + counts.bad
    return rows, dict(counts.refused)


def row(number, **further):
    return {"question": f"q {number}?", "answer": str(number), "data_source": "nq"} | further


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_text_that_is_no_utf8_costs_its_row_alone(ending, tmp_path):
    offsets = pa.py_buffer(struct.pack("4i", 0, 3, 6, 9))
    texts = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abc\xff\xfe\xfdxyz")])
    table = pa.table({"question": texts, "answer": ["1", "2", "3"], "data_source": ["nq"] * 3})
    file = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        pq.write_table(table, file)
    else:
        with pa.ipc.new_stream(file, table.schema) as sink:
            sink.write_table(table)
    tasks, [refused] = read(file)
    assert [task.question for task in tasks] == ["abc", "xyz"]
    assert refused.startswith("a value cannot be decoded")


def test_dates_and_decimal_numbers_of_tables_become_texts(tmp_path):
    date, rating = datetime.datetime(2024, 5, 1), decimal.Decimal("1.5")
    info = {"contest_date": date, "rating": rating, "deep": [{"a": None}]}
    pq.write_table(pa.Table.from_pylist([row(0, extra_info=info)]), tmp_path / "rows.parquet")
    [task], refused = read(tmp_path / "rows.parquet")
    assert not refused
    assert task.extra_info == info | {"contest_date": "2024-05-01T00:00:00", "rating": "1.5"}


def test_bytes_gaps_and_endless_levels_are_refused(tmp_path):
    deep = json.loads("[" * 600 + "]" * 600)
    rows = [
        row(0, answer=float("nan")),
        row(1, extra_info={"a": deep}),
        row(1, answer=json.loads("[" * 900 + '"x"' + "]" * 900)),
        row(2, extra_info={"n": 2**70}),
        row(3),
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks, refused = read(tmp_path / "rows.jsonl")
    assert [task.id for task in tasks] == ["x-4", "x-5"]
    assert set(refused) == {
        "`answer`: expected an answer",
        "`answer`: more than 64 levels of lists and objects",
        "`extra_info.a`: more than 64 levels of lists and objects",
    }
    write_rl(tasks, load_agent("mhqa"), tmp_path / "rl.parquet")
    [written, _] = pq.read_table(tmp_path / "rl.parquet").to_pylist()
    assert json.loads(written["extra_info"]["n"]) == 2**70
    with pytest.raises(DataError, match="`answer`: bytes"):
        plain_value([b"x"], "answer")


@pytest.mark.parametrize("name", ["../../elsewhere.arrow", "/etc/passwd", "..", "", 5, None])
def test_a_saved_folder_names_only_files_of_its_own(name, tmp_path):
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError, match="expected a name within that folder"):
        data_files(tmp_path)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(DataError, match="expected a name within that folder"):
        data_files(tmp_path)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": 5}))
    with pytest.raises(DataError, match="expected a list 'splits'"):
        data_files(tmp_path)
