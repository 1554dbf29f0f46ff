"""The starter: written into an empty folder, and its commands up to the training files run as its README has them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def afm(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "afm.cli.main", *words]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def commands() -> list[list[str]]:
    """The ``afm`` commands of the README, in order."""
    text = (ROOT / "afm/starter/README.md").read_text("utf-8")
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)).splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("afm ")]


def test_a_folder_with_files_is_refused_and_a_free_name_is_offered(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task/mine.txt").write_text("mine")
    done = afm(tmp_path, "init", "task")
    assert done.returncode == 2
    assert "task is a folder with files in it" in done.stderr
    assert "for example task_2" in done.stderr
    assert [file.name for file in (tmp_path / "task").iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_the_starter_goes_from_questions_to_training_files(tmp_path: Path) -> None:
    assert afm(tmp_path, "init", "task").returncode == 0
    task = tmp_path / "task"
    table = (task / "questions/train.csv").read_text().splitlines()
    (task / "questions/train.csv").write_text("\n".join(table[:41]) + "\n")
    quick = [words for words in commands() if words[0] == "data" or words == ["doctor", "tools.yaml"]]
    assert len(quick) == 5
    for words in quick:
        done = afm(task, *words)
        assert done.returncode == 0, f"{words}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    assert len(json.loads((task / "runs/data/weekdays.json").read_text())) == 40
    records = [json.loads(line) for line in (task / "runs/kept/kept.jsonl").read_text().splitlines()]
    called = [record["calls"] for record in records if record["calls"]]
    assert 5 < len(called) < 35
    assert all(call["observation"].endswith("day") for calls in called for call in calls)


@pytest.mark.slow
def test_a_starter_that_was_downloaded_runs_only_when_it_is_trusted(tmp_path: Path) -> None:
    assert afm(tmp_path, "init", "task").returncode == 0
    (tmp_path / "task/download.manifest.json").write_text("{}")
    refused = afm(tmp_path / "task", "doctor", "tools.yaml")
    assert refused.returncode == 1
    assert "--trust" in refused.stdout + refused.stderr
    trusted = afm(tmp_path / "task", "doctor", "tools.yaml", "--trust")
    assert trusted.returncode == 0, trusted.stdout + trusted.stderr
    assert f"importing {tmp_path / 'task/weekday_tool.py'}" in trusted.stderr
