"""Whole files or none, also after a power failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from afm.runs.atomic import replace_text, replacing, replacing_together


def test_content_reaches_the_disk_before_its_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, order, sync = tmp_path / "file", [], os.fsync

    def note(descriptor: int) -> None:
        order.append((Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path, target.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    replace_text(target, "new")
    assert order == [(False, False), (True, True)]


def test_a_block_that_fails_leaves_the_old_content_alone(tmp_path: Path) -> None:
    target = tmp_path / "file"
    replace_text(target, "old")

    def write_half() -> None:
        with replacing(target) as temporary:
            temporary.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_a_block_that_fails_leaves_no_new_folder(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    with pytest.raises(ZeroDivisionError), replacing_together([tmp_path / "new/deep/file", kept / "file"]):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == [kept]


def test_of_files_that_belong_together_the_first_appears_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, there is no first one, without which nobody begins."""
    paths, order, rename = [tmp_path / "first", tmp_path / "second"], [], Path.replace

    def note(source: Path, target: Path) -> Path:
        order.append(target.name)
        assert not paths[0].exists()
        return rename(source, target)

    monkeypatch.setattr(Path, "replace", note)
    for text in ("old", "new"):
        with replacing_together(paths) as temporaries:
            for temporary in temporaries:
                temporary.write_text(text)
    assert order == ["second", "first"] * 2
    assert [path.read_text() for path in paths] == ["new", "new"]


KILLED = """
import os, signal, sys
from pathlib import Path
from afm.runs.atomic import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_process_left_that_was_killed_here_is_cleared_away_at_once_and_not_that_of_another_machine(
    tmp_path: Path,
) -> None:
    target = tmp_path / "file.json"
    subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    [left] = tmp_path.iterdir()
    here = left.name.split(".")[2]
    other = tmp_path / left.name.replace(here, "0" * 8)
    alive = tmp_path / f"file.json.{here}.{os.getppid()}.tmp"
    for path in (other, alive):
        path.touch()
    replace_text(target, "new")
    assert sorted(tmp_path.iterdir()) == sorted([target, other, alive])
