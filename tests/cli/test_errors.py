"""What the command line says, and with which status it ends, when something is wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TASK = {"id": "a", "question": "Tom has 57 coins. Tom finds 38 more. How many coins does Tom have?"}


def afm(*words, **environment):
    command = [sys.executable, "-m", "afm.cli.main", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({**TASK, "answer": "95", "data_source": "mini_math"}) + "\n", encoding="utf-8")
    return path


def test_help_keeps_its_brackets(capsys, monkeypatch):
    """Typer takes words in brackets for a style and leaves them out."""
    from afm.cli.main import command

    def shown(path, one):
        below = getattr(one, "commands", {})
        for name, each in below.items():
            yield from shown([*path, name], each)
        wanted = [one.help or "", *(getattr(parameter, "help", None) or "" for parameter in one.params)]
        for text in wanted:
            for part in re.findall(r"\[[^\]]*\]", text.replace("\\[", "[")):
                yield path, part

    parts = list(shown([], command()))
    assert (["eval", "choose"], "[list,score]") in parts
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    for words in {tuple(path) for path, _ in parts}:
        command()([*words, "--help"], standalone_mode=False)
        help_text = capsys.readouterr().out
        for path, part in parts:
            assert path != list(words) or part in help_text, (words, part)


def test_paths_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").touch()
    assert afm("data", "world", "--out", tmp_path / "file/x") == (
        1,
        f"error: {tmp_path}/file/x: Not a directory",
    )
    assert afm("data", "world", "--out", tmp_path / "file") == (1, f"error: {tmp_path}/file: File exists")


@pytest.mark.parametrize("words", [["validate"], ["reward"], ["data", "filter", "-o", "out.jsonl"]])
def test_nothing_to_do_is_not_success(tmp_path, words):
    (tmp_path / "empty.jsonl").touch()
    words = [str(tmp_path / word) if word == "out.jsonl" else word for word in words]
    status, said = afm(*words, tmp_path / "empty.jsonl")
    assert status == 1
    assert said.startswith(f"error: {tmp_path}/empty.jsonl: holds no ")


@pytest.mark.sandbox
def test_a_data_set_stays_in_its_folder(tmp_path, tasks):
    assert afm("data", "distill", tasks, "--out", tmp_path / "d")[0] == 0
    rows = tmp_path / "d/trajectories.jsonl"
    status, said = afm("data", "prepare", "sft", rows, "--out", tmp_path / "s", "--name", "../evil")
    assert (status, "without a folder" in said) == (1, True)
    assert not (tmp_path / "evil.json").exists()


def test_without_isolation_nothing_is_distilled(tmp_path, tasks):
    """Even a program that could answer without its tool must not go on: its data would lack every tool call."""
    many = tmp_path / "many.jsonl"
    row = json.loads(tasks.read_text())
    many.write_text("".join(json.dumps({**row, "id": str(number)}) + "\n" for number in range(8)))
    status, said = afm("data", "distill", many, "--out", tmp_path / "d", PATH="/nowhere")
    assert status == 1
    assert "bubblewrap is not installed" in said
    assert "apt-get install bubblewrap" in said
