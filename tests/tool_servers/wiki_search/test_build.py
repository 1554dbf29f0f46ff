import gzip
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tool_server import build_index

from afm.datasets.encyclopaedia import Encyclopaedia, write_corpus
from afm.errors import ConfigError, DataError
from tool_servers.wiki_search.corpus import read_corpus
from tool_servers.wiki_search.index import PassageStore
from tool_servers.wiki_search.search import open_index

ROOT = Path(__file__).parents[3]


def parts(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def command(corpus, out):
    """Return the command of a build in a separate process."""
    return [sys.executable, "-m", "tool_servers.wiki_search.build", str(corpus), "--output-dir", str(out)]


@pytest.fixture
def copy(index, tmp_path):
    """Copy the index, so that a test can damage it."""
    shutil.copytree(index, tmp_path / "copy")
    return tmp_path / "copy"


def refused(*words):
    """Run a build that is refused; return its error output."""
    done = build_index(*words)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_build_tells_its_need_first_and_holds_every_passage(corpus, index, world, tmp_path):
    done = build_index(corpus, tmp_path / "index")
    first, *_, last = done.stdout.splitlines()
    assert "about 2,000 passages; disk" in first
    assert "memory" in first
    assert "2,000 passages" in last
    store = PassageStore(tmp_path / "index")
    assert [store[n].contents for n in range(len(store))] == [world.page(n).contents for n in range(2_000)]
    assert store[7].id == "7"
    assert not (tmp_path / "index/unfinished").exists()
    assert parts(tmp_path / "index") == parts(index)


def test_a_compressed_corpus_gives_the_same_index(corpus, index, tmp_path):
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    assert build_index(packed, tmp_path / "index").returncode == 0
    ours, theirs = parts(tmp_path / "index"), parts(index)
    assert ours.pop("manifest.json") != theirs.pop("manifest.json")
    assert ours == theirs


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.slow
def test_a_build_that_is_killed_goes_on_and_ends_with_the_same_files(tmp_path, suffix):
    corpus = tmp_path / f"corpus.jsonl{suffix}"
    write_corpus(Encyclopaedia(60_000), corpus)
    assert build_index(corpus, tmp_path / "whole").returncode == 0
    out = tmp_path / "killed"
    note = out / "unfinished/collected.json"
    kills = 0
    for _ in range(3):
        process = subprocess.Popen(command(corpus, out), cwd=ROOT, stdout=subprocess.DEVNULL)
        before = note.read_text() if note.exists() else ""
        while process.poll() is None and (note.read_text() if note.exists() else "") == before:
            time.sleep(0.005)
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 2
    assert not (out / "manifest.json").exists()
    assert json.loads(note.read_text())["passages"] >= 20_000
    with pytest.raises(DataError, match="no finished index"):
        open_index(out)
    for file in (*(out / "unfinished").glob("*.bin"), out / "passages.jsonl"):
        with file.open("ab") as torn:
            torn.write(b"half a write")
    assert build_index(corpus, out).returncode == 0
    assert parts(out) == parts(tmp_path / "whole")


@pytest.mark.slow
def test_a_second_build_into_the_folder_is_refused_and_the_first_one_is_right(tmp_path):
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "index"
    write_corpus(Encyclopaedia(15_000), corpus)
    first = subprocess.Popen(command(corpus, out), cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        while not (out / "unfinished/collected.json").exists():
            assert first.poll() is None
            time.sleep(0.005)
        first.send_signal(signal.SIGSTOP)  # so that it cannot finish before the second build starts
        second = refused(corpus, out)
        first.send_signal(signal.SIGCONT)
        assert "index: another build is writing into this folder" in second
        assert first.wait(120) == 0
    finally:
        first.kill()
        first.wait()
    assert (out / "passages.jsonl").read_bytes().count(b"\n") == 15_000
    open_index(out, verify=True).store.close()


def test_a_finished_build_is_not_made_again(corpus, index):
    before = (index / "manifest.json").stat().st_mtime_ns
    assert build_index(corpus, index).returncode == 0
    assert (index / "manifest.json").stat().st_mtime_ns == before


def test_an_index_of_another_corpus_is_not_written_over(corpus, index, tmp_path):
    other = tmp_path / "other.jsonl"
    write_corpus(Encyclopaedia(50), other)
    assert "holds an index of corpus.jsonl" in refused(other, index)
    same_name, content = tmp_path / corpus.name, corpus.read_bytes()
    half = len(content) // 2
    same_name.write_bytes(content[:half] + content[half:].replace(b"the", b"teh"))
    message = "holds an index of another corpus.jsonl of the same size; choose another --out"
    assert message in refused(same_name, index)


@pytest.mark.parametrize("name", ["passages.jsonl", "bm25/data.csc.index.npy", "passages.offsets.npy"])
def test_truncated_and_missing_files_are_refused(copy, name):
    os.truncate(copy / name, (copy / name).stat().st_size - 1)
    with pytest.raises(DataError, match=r"expected [\d,]+: the index is truncated"):
        open_index(copy)
    (copy / name).unlink()
    with pytest.raises(DataError, match="it is missing"):
        open_index(copy)


def test_files_of_two_builds_do_not_mix(copy, tmp_path):
    corpus, other = tmp_path / "corpus.jsonl", tmp_path / "other"
    write_corpus(Encyclopaedia(2_000, seed=2, wordings=2), corpus)
    assert build_index(corpus, other).returncode == 0
    size = (copy / "passages.jsonl").stat().st_size
    source = (other / "passages.jsonl").read_bytes()
    (copy / "passages.jsonl").write_bytes(source[:size].ljust(size, b"\n"))
    with pytest.raises(DataError, match="differs from what was built"):
        open_index(copy)


def test_verify_finds_one_changed_byte_in_the_middle(copy):
    with (copy / "passages.jsonl").open("r+b") as file:
        file.seek(300_000)
        file.write(b"#")
    open_index(copy).store.close()
    with pytest.raises(DataError, match=r"passages\.jsonl: its content differs"):
        open_index(copy, verify=True)


def test_an_engine_that_the_index_lacks_is_refused_with_the_command_that_adds_it(index):
    with pytest.raises(ConfigError, match=r"no dense part; add it: afm serve wiki build"):
        open_index(index, "hybrid")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the corpus has no passages"),
        ('{"id": "1", "contents": "two words"}\n{"id": 2}\n', "c.jsonl:2: contents: got None"),
        (
            "[1]\n",
            'c.jsonl:1: got list; expected one object per line: {"id": "1", "contents": "TITLE and text"}',
        ),
        ('{"text": "a"}\n', "c.jsonl:1: got an object with text; expected one object per line"),
        (
            '{"id": "1", "contents"',
            "c.jsonl:1: not JSON: Expecting ':' delimiter at character 23; expected one",
        ),
        ('{"id": 1, "contents": "a"}\n{"id": 2, "contents": ' + "[" * 100_000, "c.jsonl:2: not JSON"),
        ('{"id": "1", "contents": "a b c"}\n', "has a word of two letters"),
    ],
)
def test_bad_corpora_are_refused_with_file_and_line(tmp_path, text, message):
    (tmp_path / "c.jsonl").write_text(text)
    assert message in refused(tmp_path / "c.jsonl", tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"id": "1", "contents": "two words"}\n'.encode("utf-16"),
            "got UTF-16, expected UTF-8; convert it: iconv",
        ),
        (b"\x1f\x8b\x08\x00", "got a file packed with gzip"),
        (b"id,contents\n1,two words\n", "got a table (CSV), expected one JSON object per line"),
        (b'{"id": "1", "contents": "Gr\xfc\xdfe"}\n', "not JSON: byte 28 of the line is not UTF-8"),
    ],
    ids=["utf-16", "gzip", "csv", "latin-1"],
)
def test_other_files_are_refused_by_what_they_are(tmp_path, content, message):
    (tmp_path / "c.jsonl").write_bytes(content)
    assert f"c.jsonl:1: {message}" in refused(tmp_path / "c.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mark_of_utf_8_is_no_part_of_the_first_passage(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(b'\xef\xbb\xbf{"id": "1", "contents": "two words"}\n')
    assert [row.passage.contents for row in read_corpus(tmp_path / "c.jsonl")] == ["two words"]


def test_a_full_disk_is_one_error(corpus, tmp_path):
    words = shlex.join(command(corpus, tmp_path / "out"))
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 100; {words}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_half_a_gzip_file_is_refused(corpus, tmp_path):
    packed = tmp_path / "c.jsonl.gz"
    whole = gzip.compress(corpus.read_bytes())
    packed.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="broken compressed data"):
        list(read_corpus(packed))


@pytest.mark.parametrize("options", [["--engine", "dense"], ["--model", "x"], ["--faiss", "square"]])
def test_wrong_usage_ends_with_status_2(corpus, tmp_path, options):
    assert build_index(corpus, tmp_path / "out", *options).returncode == 2


def test_rows_with_title_and_text_are_passages_too(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"id": 5, "title": "Ada", "text": "A person."}\n\n')
    [row] = read_corpus(tmp_path / "c.jsonl")
    assert (row.passage.id, row.passage.contents) == ("5", '"Ada"\nA person.')
