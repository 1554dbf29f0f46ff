"""The published wiki corpus and index, fetched from a server that speaks the hub's protocol and has its faults."""

import gzip
import hashlib
import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from extras import needs

from afm.datasets.hub import HubFile
from afm.datasets.wiki18 import Download, check_space
from afm.errors import DataError

needs("huggingface_hub")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "data/mhqa_agent/download_wiki.py"
INDEX = "PeterJinGo/wiki-18-e5-index"
CORPUS = "PeterJinGo/wiki-18-corpus"
REVISION = "0123456789abcdef0123456789abcdef01234567"
PASSAGES, DIMENSIONS = 8_000, 768


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def published():
    """A small corpus and its FAISS index in their published form: compressed, and in two parts."""
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
    return {
        INDEX: {"README.md": b"# E5 index", "part_aa": whole[:half], "part_ab": whole[half:]},
        CORPUS: {"README.md": b"# corpus", "wiki-18.jsonl.gz": corpus},
    }


@pytest.fixture
def hub(hub, published):
    hub.repositories = {name: dict(files) for name, files in published.items()}
    return hub


@pytest.fixture
def download(said, hub_here, tmp_path):
    return partial(said, "serve", "wiki", "download", "--output-dir", tmp_path / "a folder")


def whole(published):
    return published[INDEX]["part_aa"] + published[INDEX]["part_ab"]


@pytest.mark.slow
def test_what_is_fetched_is_built_by_the_command_that_is_shown(
    hub, hub_environment, download, published, tmp_path
):
    folder = tmp_path / "a folder"
    script = [sys.executable, str(SCRIPT), "--output-dir", str(folder)]
    printed = subprocess.run(script, env=hub_environment, capture_output=True, text=True, check=True).stdout
    assert "24 MiB to fetch; peak disk usage 35 MiB" in printed
    assert (folder / "e5_Flat.index").read_bytes() == whole(published)
    assert {path.name for path in folder.iterdir()} == {"e5_Flat.index", "wiki-18.jsonl.gz"}
    requests = list(zip(hub.asked, hub.headers, strict=True))
    named = {path for path, headers in requests if "authorization" in map(str.lower, headers)}
    assert named == {path for path in hub.asked if "datasets/" in path}, "the token goes to the Hub alone"
    assert len([path for path in hub.asked if path.startswith("/store/")]) == 3
    build, serve = printed.partition("then:\n")[2].splitlines()
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


def test_a_kill_while_parts_are_joined_spoils_nothing(hub, download, published, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    first = published[INDEX]["part_aa"]
    (folder / "e5_Flat.index.partial").write_bytes(first + b"half of the next")
    (folder / "e5_Flat.index.json").write_text(json.dumps([sha256(first)]))
    download()
    assert (folder / "e5_Flat.index").read_bytes() == whole(published)
    assert not any(name == "part_aa" for name, _, _ in hub.sent)


@pytest.mark.parametrize(("ranges", "same", "start"), [(1, 1, 1000), (0, 1, 0), (1, 0, 0)])
def test_a_part_goes_on_where_it_was_if_the_server_can_and_has_the_same(
    ranges, same, start, hub, download, published, tmp_path
):
    folder = tmp_path / "a folder"
    folder.mkdir()
    part = published[INDEX]["part_aa"]
    digest = sha256(part)[:12] if same else "000000000000"
    (folder / f"part_aa.{digest}.partial").write_bytes(part[:1000])
    hub.ranges = ranges
    download()
    assert (folder / "e5_Flat.index").read_bytes() == whole(published)
    assert ("part_aa", start, len(part) - start) in hub.sent


def test_the_corpus_can_be_had_without_compression_or_an_index(hub, download, published, tmp_path):
    assert "--faiss" not in download("--index", "none", "--gunzip", "--dry-run")
    assert hub.sent == []
    download("--index", "none", "--gunzip")
    text = (tmp_path / "a folder/wiki-18.jsonl").read_bytes()
    assert text == gzip.decompress(published[CORPUS]["wiki-18.jsonl.gz"])


def test_an_index_without_its_parts_is_told(hub, download):
    hub.repositories[INDEX] = {"README.md": b""}
    assert f"dataset {INDEX} holds no files part_aa, part_ab" in download(status=1)


def test_a_disk_that_is_too_small_is_told_before_the_download(tmp_path):
    def part(name, size):
        return HubFile(INDEX, name, size, "0" * 64, REVISION)

    tib = 1 << 40
    parts = (part("part_aa", 400 * tib), part("part_ab", 200 * tib))
    download = Download(tmp_path, part("wiki-18.jsonl.gz", tib), parts, "e5_Flat.index", False)
    assert download.summary() == "615424.0 GiB to fetch; peak disk usage 1025024.0 GiB"
    with pytest.raises(DataError, match=r"GiB free, 1025024\.0 GiB needed; choose another disk"):
        check_space(download)
