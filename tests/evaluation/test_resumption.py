import random
from pathlib import Path

import pytest

from afm.errors import DataError
from afm.evaluation.run import FinishedEpisodes
from afm.trajectory.io import load_records

IDS = ["a#0", "b#0", "line\nfeed#1", "back\\slash", "ünï#2", "a#1"]


def write(path: Path, record, scores) -> list[bytes]:
    """The lines of the file then."""
    with FinishedEpisodes(path) as episodes:
        for name, score in zip(IDS, scores, strict=False):
            episodes.write(record(name, score).model_copy(update={"id": name}))
    return path.read_bytes().splitlines(keepends=True)


def finished(path: Path) -> list[str]:
    episodes = FinishedEpisodes(path)
    ids = [one.id for one in episodes.records()]
    assert ids == [one.id for one in load_records(path)]
    assert set(ids) == episodes.ids
    return ids


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "episodes.jsonl"


def test_only_episodes_of_earlier_starts_are_its_records(path: Path, record) -> None:
    write(path, record, [1.0] * 3)
    with FinishedEpisodes(path) as episodes:
        episodes.write(record("new", 1.0))
        assert [one.id for one in episodes.records()] == IDS[:3]
    assert finished(path) == [*IDS[:3], "new#0"]


def test_episodes_without_a_score_are_forgotten_and_the_others_kept_byte_for_byte(path: Path, record) -> None:
    lines = write(path, record, [None, 1.0, 0.0, None, None, 1.0])
    assert finished(path) == [IDS[1], IDS[2], IDS[5]]
    assert path.read_bytes() == lines[1] + lines[2] + lines[5]
    write(path, record, [1.0])
    assert set(finished(path)) == {IDS[0], IDS[1], IDS[2], IDS[5]}


@pytest.mark.parametrize("seed", range(10))
def test_whatever_a_kill_leaves_is_read_rightly(path: Path, record, seed: int) -> None:
    draw = random.Random(seed)
    scores = [draw.choice([1.0, 0.0, None]) for _ in IDS]
    lines = write(path, record, scores)
    body = path.read_bytes()[: draw.randrange(path.stat().st_size + 1)]
    path.write_bytes(body)
    whole = [
        (name, line)
        for name, line, score in zip(IDS, lines, scores, strict=True)
        if score is not None and line.rstrip(b"\n") in body
    ]
    assert finished(path) == [name for name, _ in whole]
    assert path.read_bytes() == b"".join(line for _, line in whole)


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_bad_line_is_named(path: Path, record, place: str) -> None:
    lines = write(path, record, [1.0, 1.0])
    bad = b'{"id": 3}\n'
    path.write_bytes(b"".join([bad, *lines] if place == "first" else [*lines, b"\n", bad]))
    with pytest.raises(DataError, match=rf"episodes\.jsonl:{1 if place == 'first' else 4}: "):
        FinishedEpisodes(path)
