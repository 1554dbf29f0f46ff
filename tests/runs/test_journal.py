"""Lines that a kill cannot lose, double or run together."""

import errno
import os
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from afm.errors import ConfigError, DataError
from afm.runs.journal import Journal, KeyedJournal, read_rows


def test_a_key_is_written_once_over_all_starts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for value in (1, 2):
        with KeyedJournal(path) as journal:
            journal.add({"key": "a", "value": value})
            assert journal.find("a") == {"key": "a", "value": 1}
    assert path.read_bytes() == b'{"key": "a", "value": 1}\n'


def test_a_torn_line_is_set_aside_and_a_whole_one_gets_its_line_feed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": ')
    assert len(list(read_rows(path, {"a": int}))) == 1
    with Journal(path) as journal:
        assert journal.repaired_bytes == 6
        assert journal.append_row({"a": 2}) == path.stat().st_size == 18
    path.write_bytes(path.read_bytes()[:-1])
    with Journal(path):
        assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'
    assert (tmp_path / "rows.jsonl.partial").read_bytes() == b'{"a": \n'


@pytest.mark.parametrize("torn", [b"{", b"\x00" * 200_000])
def test_whatever_is_torn_is_set_aside_with_what_earlier_kills_left(tmp_path: Path, torn: bytes) -> None:
    """Also where it is the whole file, and where it is longer than a block."""
    path = tmp_path / "rows.jsonl"
    for kept in (b"", b'{"a": 1}\n'):
        path.write_bytes(kept + torn)
        with Journal(path) as journal:
            assert journal.repaired_bytes == len(torn)
        assert path.read_bytes() == kept
    assert (tmp_path / "rows.jsonl.partial").read_bytes() == (torn + b"\n") * 2


@pytest.mark.parametrize("content", [b"my notes\nwithout an end", b'{\n  "a": 1\n}', b"\x89PNG\r\x1a\x00"])
def test_the_last_line_of_another_file_is_left_where_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match="expected rows of JSON; the file was not changed, choose another"):
        Journal(path).__enter__()
    assert path.read_bytes() == content
    assert [*tmp_path.iterdir()] == [path]


def test_a_second_writer_is_refused_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path), pytest.raises(ConfigError, match="another run is writing here"):
        Journal(path).__enter__()
    path.write_text('{"key": "a"}\n{"key": 1}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: not a JSON object with the keys key"):
        KeyedJournal(path).__enter__()


def test_a_line_that_the_disk_does_not_take_whole_leaves_nothing(tmp_path: Path) -> None:
    class FullDisk(FileIO):
        def write(self, data: Any) -> int:
            super().write(data[:3])
            raise OSError(errno.ENOSPC, "no space left")

    path = tmp_path / "rows.jsonl"
    with Journal(path) as journal:
        journal.append_row({"a": 1})
        journal._file = FullDisk(path, "ab")
        with pytest.raises(OSError, match="no space left"):
            journal.append_row({"a": 2})
    assert path.read_bytes() == b'{"a": 1}\n'


def test_lines_wait_for_the_disk_where_that_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for sync in (False, True):
        with Journal(tmp_path / "rows.jsonl", sync=sync) as journal:
            journal.append_row({})
    assert len(synced) == 1
