"""Episodes that a run keeps, those that a resumed one still has, and the advantages next to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from afm.errors import DataError
from afm.trajectory.record import advantages_file, load_advantages
from verl_ext.kept_episodes import (
    STUCK_FILE,
    advantages_of,
    episodes_file,
    forget_after,
    kept_episodes,
    write_advantages,
)


def row(name: str, step: int, **origin: Any) -> str:
    return json.dumps({"id": name, "provenance": {"task": "q", "step": step} | origin}) + "\n"


def names(file: Path) -> list[str]:
    return [json.loads(line)["id"] for line in file.read_text().splitlines() if line.startswith("{")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was killed after step 3 while it wrote a line. Its last checkpoint is of step 2."""
    both = row("b", 2), row("validated", 2, validation=True)
    (tmp_path / STUCK_FILE).write_text(row("a", 1) + "junk\n" + "".join(both) + row("c", 3) + '{"id": "half')
    episodes_file(tmp_path, 2).parent.mkdir()
    episodes_file(tmp_path, 2).write_text("".join(both))
    episodes_file(tmp_path, 3).write_text(row("c", 3))
    return tmp_path


def test_episodes_of_steps_that_are_done_again_go(run: Path) -> None:
    forget_after(run, 2)
    assert names(run / STUCK_FILE) == ["a", "b", "validated"]
    assert "junk\n" in (run / STUCK_FILE).read_text()
    assert names(episodes_file(run, 2)) == ["b", "validated"]
    assert not episodes_file(run, 3).exists()
    assert sorted(file.name for file in run.iterdir()) == ["episodes", STUCK_FILE]


def test_a_validation_that_is_done_again_goes_too(run: Path) -> None:
    forget_after(run, 2, validated_again=True)
    assert names(run / STUCK_FILE) == ["a", "b"]
    assert names(episodes_file(run, 2)) == ["b"]


def test_without_a_checkpoint_all_go_and_nothing_is_made(run: Path, tmp_path: Path) -> None:
    forget_after(run, 0, validated_again=True)
    assert names(run / STUCK_FILE) == []
    assert not list((run / "episodes").iterdir())
    forget_after(tmp_path / "new", 0)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def steps(tmp_path):
    for step in (1, 2, 3):
        file = episodes_file(tmp_path, step)
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps({"id": f"{step}/u_{step}/{sample}"}) + "\n" for sample in (0, 7)))
    return tmp_path


def test_a_batch_finds_the_kept_episodes_of_its_step_and_of_those_before(steps) -> None:
    kept = kept_episodes(steps, 2)
    episodes = [(step, f"u_{step}/{sample}") for step in (1, 2) for sample in (0, 7)]
    assert kept == {name: (step, f"{step}/{name}") for step, name in episodes}
    assert kept_episodes(steps, 20) == {}


def test_a_group_has_one_number_and_a_critic_one_for_each_token() -> None:
    assert advantages_of([0.5, 0.0, 0.5], [1, 0, 1]) == 0.5
    assert advantages_of([0.5, 0.0, -0.25], [1, 0, 1]) == [0.5, 0.0, -0.25]
    assert advantages_of([0.0, 0.0], [0, 0]) == [0.0, 0.0]


def test_what_is_known_stays_and_steps_done_again_are_forgotten(steps) -> None:
    write_advantages(steps, [(2, "2/u_2/0", 0.5), (3, "3/u_3/7", [1.0, -1.0])])
    write_advantages(steps, [(2, "2/u_2/7", -0.5)])
    assert load_advantages(episodes_file(steps, 2)) == {"2/u_2/0": 0.5, "2/u_2/7": -0.5}
    forget_after(steps, 2)
    left = {"step_000001.jsonl", "step_000002.advantages.json", "step_000002.jsonl"}
    assert {file.name for file in (steps / "episodes").iterdir()} == left


@pytest.mark.parametrize("text", ["[1]", "{", "\udcff"])
def test_a_broken_file_is_told(steps, text) -> None:
    file = advantages_file(episodes_file(steps, 1))
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=r"cannot be read|expected an object"):
        load_advantages(episodes_file(steps, 1))
