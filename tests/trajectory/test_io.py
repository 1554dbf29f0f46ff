from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from afm.errors import DataError
from afm.trajectory import Author, Record, RecordWriter, load_records, read_records
from afm.trajectory.tags import Segment


def record(identity: str, text: str = "<answer>1</answer>") -> Record:
    segments = (Segment(Author.AGENT, text),)
    return Record(id=identity, agent="math", agent_digest="0" * 16, question="1?", segments=segments)


def write(path: Path, *records: Record) -> None:
    with RecordWriter(path) as writer:
        for row in records:
            writer.write(row)


def test_records_are_appended_readable_at_once_and_come_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    with pytest.raises(DataError, match="No such file"):
        load_records(path)
    rows = [record("a"), record("b", 'é 🙂 \u2028 \n \\ " \x00')]
    write(path, rows[0])
    with RecordWriter(path) as writer:
        writer.write(rows[1])
        assert load_records(path) == rows


def test_every_bad_line_is_reported_and_the_good_ones_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = record("a").model_dump_json().encode()
    newer = good.replace(b'"schema_version":1', b'"schema_version":2')
    extra = good[:-1] + b',"colour":"red"}'
    latin = good.replace(b'"id":"a"', b'"id":"\xe9"')
    marked = b"\xef\xbb\xbf" + good  # as files that were joined have it
    path.write_bytes(b"\n".join([good, b"{oops", b"", b'{"id": 3}', newer, extra, latin, marked]) + b"\n")
    items = list(read_records(path))
    assert [item.id for item in items if isinstance(item, Record)] == ["a", "a"]
    errors = [str(item) for item in items if isinstance(item, DataError)]
    assert [error.split(": ")[0] for error in errors] == [f"{path}:{line}" for line in (2, 4, 5, 6, 7)]
    assert "invalid JSON" in errors[0]
    assert "id: got 3" in errors[1]
    assert "schema_version: got 2" in errors[2]
    assert "colour: unknown key" in errors[3]
    assert (
        "a byte that is not UTF-8 at character 26; save the file as UTF-8, for example so: iconv" in errors[4]
    )
    with pytest.raises(DataError, match=r"rows\.jsonl:2: "):
        load_records(path)


def test_record_that_json_cannot_hold_is_refused_and_leaves_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with RecordWriter(path) as writer:
        with pytest.raises(DataError, match="record 'bad' cannot be written"):
            writer.write(record("bad", "\ud800"))
        writer.write(record("good"))
    assert [row.id for row in load_records(path)] == ["good"]


def test_large_file_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with RecordWriter(path) as writer:
        for number in range(40):
            writer.write(record(str(number), "x" * 1_000_000))
    tracemalloc.start()
    assert sum(1 for _ in read_records(path)) == 40
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000
