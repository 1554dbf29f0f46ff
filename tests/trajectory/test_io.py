from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from afm.errors import DataError
from afm.trajectory import Author, Record, RecordWriter, load_records, read_records
from afm.trajectory.record import TextSegment


def record(identity: str, text: str = "<answer>1</answer>") -> Record:
    segments = (TextSegment(author=Author.AGENT, text=text),)
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
    path.write_bytes(b"\n".join([good, b"{oops", b"", b'{"id": 3}', newer, extra, b"\xff\xfe", good]) + b"\n")
    items = list(read_records(path))
    assert [item.id for item in items if isinstance(item, Record)] == ["a", "a"]
    errors = [str(item) for item in items if isinstance(item, DataError)]
    assert [error.split(": ")[0] for error in errors] == [f"{path}:{line}" for line in (2, 4, 5, 6, 7)]
    assert "no valid JSON" in errors[0]
    assert "id: got 3" in errors[1]
    assert "schema_version: got 2" in errors[2]
    assert "colour: got 'red'" in errors[3]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: "):
        load_records(path)


def test_record_that_json_cannot_hold_is_refused_and_leaves_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with RecordWriter(path) as writer:
        with pytest.raises(DataError, match="record 'bad' cannot be written"):
            writer.write(record("bad", "\ud800"))
        writer.write(record("good"))
    assert [row.id for row in load_records(path)] == ["good"]


WRITER = """
import sys
from afm.trajectory import Author, Record, RecordWriter
from afm.trajectory.record import TextSegment
with RecordWriter(sys.argv[1]) as writer:
    for number in range(10**9):
        segments = (TextSegment(author=Author.AGENT, text="x" * 3_000_000),)
        writer.write(Record(id=str(number), agent="a", agent_digest="d", question="q", segments=segments))
"""


def test_killed_writer_loses_at_most_the_line_it_was_writing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as process:
        while process.poll() is None and (not path.exists() or path.stat().st_size < 6_000_000):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    write(path, record("end"))
    *written, last = load_records(path)
    assert [row.id for row in written] == [str(number) for number in range(len(written))]
    assert len(written) >= 1
    assert last.id == "end"


def test_large_file_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with RecordWriter(path) as writer:
        for number in range(40):
            writer.write(record(str(number), "x" * 1_000_000))
    code = (
        "import resource, sys\n"
        "from afm.trajectory import read_records\n"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "count = sum(1 for _ in read_records(sys.argv[1]))\n"
        "print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) // 1024)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    ).stdout
    count, grown_mib = map(int, output.split())
    assert count == 40
    assert grown_mib < 20
