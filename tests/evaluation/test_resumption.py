"""What a run finds finished when it starts again: quickly by the index, rightly whatever a kill left of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from afm.errors import DataError
from afm.evaluation.resumption import FinishedEpisodes
from afm.trajectory.io import RecordWriter, load_records

IDS = ["a#0", "b#0", "line\nfeed#1", "back\\slash", "ünï#2", "a#1"]


def written(path: Path, record, scores) -> None:
    with FinishedEpisodes(path) as episodes:
        for name, score in zip(IDS, scores, strict=False):
            one = record(name, score).model_copy(update={"id": name})
            episodes.write(one, scored=score is not None)


def found(path: Path) -> list[str]:
    episodes = FinishedEpisodes(path)
    names = [one for one in [*IDS, "c#0"] if one in episodes]
    assert episodes.count == len(names) == len(list(episodes.records()))
    assert [one.id for one in episodes.records()] == [one.id for one in load_records(path)]
    return names


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "episodes.jsonl"


def test_a_second_start_knows_every_episode_without_reading_them(path: Path, record) -> None:
    written(path, record, [1.0] * 6)
    assert found(path) == IDS
    index = path.with_suffix(".index").read_bytes()
    assert index.splitlines()[0] == b"%014x+a#0" % (path.read_bytes().index(b"\n") + 1)
    body = path.read_bytes()
    path.write_bytes(body.replace(b'"verdict"', b'"verdicT"', 1))  # of the first, which is not read
    assert "a#0" in FinishedEpisodes(path)
    with pytest.raises(DataError, match=r"episodes\.jsonl:1: "):
        list(FinishedEpisodes(path).records())


def test_episodes_without_a_score_are_forgotten_and_the_others_kept_byte_for_byte(path: Path, record) -> None:
    written(path, record, [None, 1.0, 0.0, None, None, 1.0])
    lines = path.read_bytes().splitlines(keepends=True)
    assert found(path) == [IDS[1], IDS[2], IDS[5]]
    assert path.read_bytes() == lines[1] + lines[2] + lines[5]
    assert path.with_suffix(".index").read_bytes().count(b"-") == 0
    written(path, record, [1.0])
    assert set(found(path)) == {IDS[0], IDS[1], IDS[2], IDS[5]}


@pytest.mark.parametrize("seed", range(25))
def test_whatever_a_kill_leaves_is_read_rightly(path: Path, record, seed: int) -> None:
    draw = random.Random(seed)
    written(path, record, [draw.choice([1.0, 0.0, None]) for _ in IDS])
    index = path.with_suffix(".index")
    scored = {
        one.id: line
        for one, line in zip(load_records(path), path.read_bytes().splitlines(keepends=True), strict=True)
        if one.verdict and one.verdict.score is not None
    }
    body = path.read_bytes()[: draw.randrange(len(path.read_bytes()) + 1)]
    path.write_bytes(body)
    match draw.randrange(4):
        case 0:
            index.unlink()
        case 1:
            index.write_bytes(index.read_bytes()[: draw.randrange(len(index.read_bytes()))])
        case 2:
            index.write_bytes(b"00000000000003+a#0\n" + index.read_bytes())
    whole = [name for name, line in scored.items() if line.rstrip(b"\n") in body]
    assert set(found(path)) == set(whole)
    assert path.read_bytes() == b"".join(scored[name] for name in whole)


def test_a_file_that_was_made_without_an_index_is_read(path: Path, record) -> None:
    with RecordWriter(path) as writer:
        writer.write(record("a", 1.0))
        writer.write(record("b", None))
    with path.open("ab") as file:
        file.write(b"\n")
    episodes = FinishedEpisodes(path)
    assert ("a#0" in episodes, "b#0" in episodes, episodes.count) == (True, False, 1)


def test_a_bad_line_is_named(path: Path, record) -> None:
    written(path, record, [1.0, 1.0])
    path.write_bytes(b'{"id": 3}\n' + path.read_bytes())
    with pytest.raises(DataError, match=r"episodes\.jsonl:1: "):
        FinishedEpisodes(path)


@pytest.mark.parametrize(
    "damage", [b"\xff" * 20, b"0" * 20, b"00000000000012?a#0", b"", b"00000000000012+\xed\xff"]
)
def test_an_index_damaged_in_the_middle_is_made_anew(path: Path, record, damage: bytes) -> None:
    written(path, record, [1.0] * 6)
    index = path.with_suffix(".index")
    lines = index.read_bytes().split(b"\n")
    index.write_bytes(b"\n".join([*lines[:2], damage, *lines[3:]]))
    assert found(path) == IDS
    assert index.read_bytes().split(b"\n") == lines


def test_a_bad_line_behind_the_index_is_named(path: Path, record) -> None:
    written(path, record, [1.0, 1.0])
    with path.open("ab") as file:
        file.write(b'\n{"id": 3}\n')
    with pytest.raises(DataError, match=r"episodes\.jsonl:4: "):
        FinishedEpisodes(path)
