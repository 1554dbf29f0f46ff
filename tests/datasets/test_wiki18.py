"""The published wiki corpus and index, fetched from a server that speaks the hub's protocol and has its faults."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from extras import needs
from typer.testing import CliRunner

from afm.cli.serve import app
from afm.datasets.hub import HubFile
from afm.datasets.wiki18 import Download, check_space
from afm.errors import AfmError, DataError

needs("huggingface_hub")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "data/mhqa_agent/download_wiki.py"
INDEX = "PeterJinGo/wiki-18-e5-index"
CORPUS = "PeterJinGo/wiki-18-corpus"
REVISION = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a_secret_of_a_test"
PASSAGES, DIMENSIONS = 8_000, 768
CHUNK = 10 << 20
"""What the hub's client writes at once; what is cut off below it is fetched again."""


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def published():
    """A small corpus and a FAISS index of it, as they are published: compressed, and in two parts."""
    faiss, numpy = pytest.importorskip("faiss"), pytest.importorskip("numpy")
    index = faiss.IndexFlatIP(DIMENSIONS)
    index.add(numpy.random.default_rng(1).normal(size=(PASSAGES, DIMENSIONS)).astype("float32"))
    whole = faiss.serialize_index(index).tobytes()
    lines = (
        json.dumps({"id": str(n), "contents": f'"Page {n}"\nPage {n} tells of the number {n}.'})
        for n in range(PASSAGES)
    )
    corpus = gzip.compress(("\n".join(lines) + "\n").encode())
    half = len(whole) // 2 + 1
    assert CHUNK < half < 2 * CHUNK
    return {
        INDEX: {"README.md": b"# E5 index", "part_aa": whole[:half], "part_ab": whole[half:]},
        CORPUS: {"README.md": b"# corpus", "wiki-18.jsonl.gz": corpus},
    }


@pytest.fixture
def hub(hub, published):
    hub.repositories = {name: dict(files) for name, files in published.items()}
    return hub


@pytest.fixture
def download(hub_here, tmp_path):
    """Runs the command in this process, into ``a folder``; returns what it said."""

    def run(*options, status=0):
        words = ["wiki", "download", "--output-dir", str(tmp_path / "a folder"), *options]
        result = CliRunner().invoke(app, words)
        told = result.output + (str(result.exception) if isinstance(result.exception, AfmError) else "")
        assert (result.exit_code, isinstance(result.exception, AfmError)) == (status, status == 1), told
        assert TOKEN not in told
        return told

    return run


def whole(published):
    return published[INDEX]["part_aa"] + published[INDEX]["part_ab"]


@pytest.mark.slow
def test_what_is_fetched_is_built_by_the_command_that_is_shown(hub, download, published, tmp_path):
    folder = tmp_path / "a folder"
    told = download()
    assert "24 MiB to fetch; disk at most 35 MiB on the way" in told
    assert (folder / "e5_Flat.index").read_bytes() == whole(published)
    assert {path.name for path in folder.iterdir()} == {"e5_Flat.index", "wiki-18.jsonl.gz"}
    named = {path for path, names in hub.header_names if "authorization" in names}
    asked = {path for path, _ in hub.header_names if "datasets/" in path}
    assert named >= asked
    assert not any(path.startswith("/store/") for path in named)
    assert len([path for path, _ in hub.header_names if path.startswith("/store/")]) == 3
    build, serve = told.partition("then:\n")[2].splitlines()
    assert shlex.split(serve) == ["afm", "serve", "wiki", "--index", str(folder / "index")]
    words = [sys.executable, "-m", "afm.cli.main", *shlex.split(build)[1:]]
    subprocess.run(words, check=True, capture_output=True, cwd=tmp_path)
    facts = json.loads((folder / "index/manifest.json").read_text())["dense"]
    assert (facts["model"], facts["dimensions"], facts["faiss"]) == ("intfloat/e5-base-v2", 768, "imported")
    assert (facts["query_prefix"], facts["passage_prefix"]) == ("query: ", "passage: ")
    assert (folder / "index/dense/index.faiss").samefile(folder / "e5_Flat.index")
    sent = len(hub.sent)
    download()
    assert len(hub.sent) == sent


@pytest.mark.slow
def test_a_download_that_is_killed_goes_on(hub, hub_environment, download, published, tmp_path):
    folder = tmp_path / "a folder"
    words, environment = [sys.executable, str(SCRIPT), "--output-dir", str(folder)], hub_environment
    hub.pause_s = 0.02
    kept = {}
    for name in ("part_aa", "part_ab"):
        with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as process:
            for _ in range(1_000):
                if any(path.stat().st_size for path in folder.glob(f"{name}.*.partial")):
                    break
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        [partial] = folder.glob(f"{name}.*.partial")
        kept[name] = partial.stat().st_size
        assert 0 < kept[name] < len(published[INDEX][name])
    hub.pause_s, killed = 0.0, len(hub.sent)
    download()
    assert (folder / "e5_Flat.index").read_bytes() == whole(published)
    assert hub.sent[killed:] == [
        ("part_ab", kept["part_ab"], len(published[INDEX]["part_ab"]) - kept["part_ab"])
    ]
    assert [start for name, start, _ in hub.sent if name == "part_aa"] == [0, kept["part_aa"]]


def test_a_kill_while_parts_are_joined_spoils_nothing(hub, download, published, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    first = published[INDEX]["part_aa"]
    (folder / "e5_Flat.index.partial").write_bytes(first + b"half of the next")
    (folder / "e5_Flat.index.json").write_text(json.dumps([sha256(first)]))
    download()
    assert (folder / "e5_Flat.index").read_bytes() == whole(published)
    assert not any(name == "part_aa" for name, _, _ in hub.sent)


@pytest.mark.parametrize("state", ["right", "another"])
def test_a_part_is_fetched_whole_without_ranges_or_of_another_state(
    state, hub, download, published, tmp_path
):
    folder = tmp_path / "a folder"
    folder.mkdir()
    part = published[INDEX]["part_aa"]
    digest = sha256(part)[:12] if state == "right" else "000000000000"
    (folder / f"part_aa.{digest}.partial").write_bytes(part[:1000])
    hub.ranges = state == "another"
    download()
    assert (folder / "e5_Flat.index").read_bytes() == whole(published)
    assert ("part_aa", 0, len(part)) in hub.sent


def test_bytes_that_are_wrong_are_noticed_and_fetched_anew(hub, download):
    repository, name = INDEX, "part_ab"
    right = hub.repositories[repository][name]
    described = hub.described
    stated = described(repository, hub.repositories[repository])
    hub.repositories[repository][name] = right[:-1] + bytes([right[-1] ^ 1])
    hub.described = lambda asked, files: stated if asked == repository else described(asked, files)
    told = download(status=1)
    assert f"expected {sha256(right)}; it was removed, run the same command again" in told
    hub.repositories[repository][name] = right
    download()


def test_a_dry_run_says_what_it_takes(hub, download, tmp_path):
    told = download("--index", "none", "--gunzip", "--dry-run")
    assert re.search(r"\d+ MiB to fetch; disk at most \d+ MiB on the way", told)
    assert "--faiss" not in told
    assert hub.sent == []
    assert list((tmp_path / "a folder").iterdir()) == []


def test_the_corpus_can_be_had_without_compression(download, published, tmp_path):
    download("--index", "none", "--gunzip")
    text = (tmp_path / "a folder/wiki-18.jsonl").read_bytes()
    assert text == gzip.decompress(published[CORPUS]["wiki-18.jsonl.gz"])


def test_what_is_not_there_is_named(hub, hub_here, download):
    hub.repositories[INDEX] = {"README.md": b""}
    assert f"dataset {INDEX} holds no files part_aa, part_ab" in download(status=1)
    del hub.repositories[CORPUS]
    assert re.search(
        rf"dataset {CORPUS} of http://.*: 401.*Repository Not Found", download(status=1), re.DOTALL
    )
    hub_here("http://127.0.0.1:9")
    assert f"dataset {CORPUS} of http://127.0.0.1:9: " in download(status=1)


def test_a_disk_that_is_too_small_is_told_before_the_download(tmp_path):
    def part(name, size):
        return HubFile(INDEX, name, size, "0" * 64, REVISION)

    tib = 1 << 40
    parts = (part("part_aa", 400 * tib), part("part_ab", 200 * tib))
    download = Download(tmp_path, part("wiki-18.jsonl.gz", tib), parts, "e5_Flat.index", False)
    assert download.summary() == "615424.0 GiB to fetch; disk at most 1025024.0 GiB on the way"
    with pytest.raises(DataError, match=r"GiB free, 1025024\.0 GiB needed; choose another disk"):
        check_space(download)
