"""What a resumed training keeps of the episodes that were written down before."""

import json
from pathlib import Path
from typing import Any

import pytest

from verl_ext.kept_episodes import STUCK_FILE, episodes_file, forget_after


def row(name: str, step: int, **origin: Any) -> str:
    return json.dumps({"id": name, "provenance": {"task": "q", "step": step} | origin}) + "\n"


def names(file: Path) -> list[str]:
    return [json.loads(line)["id"] for line in file.read_text().splitlines() if line.startswith("{")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Killed after step 3 while it wrote a line; the last checkpoint is that of step 2."""
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
