import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afm.errors import ConfigError
from verl_ext.processes import SCRATCH_PREFIX, Process, ProcessBook, descendants, end, this_process

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"


Start = Callable[[str], tuple[subprocess.Popen[str], str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program and read its first line. Its remaining processes end with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield run
    for process in started:
        end(descendants(process.pid))
        process.kill()
        process.wait()


def test_descendants_include_grandchildren_in_other_sessions(start: Start) -> None:
    process, grandchild = start(FAMILY)
    found = descendants(os.getpid())
    assert {process.pid, int(grandchild)} <= {item.pid for item in found}
    assert end([item for item in found if item.pid in (process.pid, int(grandchild))]) == 2


def test_what_ignores_a_polite_request_is_killed(start: Start) -> None:
    process, _ = start(STUBBORN)
    [found] = [item for item in descendants(os.getpid()) if item.pid == process.pid]
    assert end([found], grace_s=0.3) == 1
    assert not found.alive


def test_a_reused_id_is_somebody_else(start: Start) -> None:
    process, _ = start(FAMILY)
    impostor = Process(process.pid, started=1)
    assert not impostor.alive
    assert end([impostor]) == 0
    assert process.poll() is None


def test_orphans_of_a_launcher_stay_its_descendants() -> None:
    code = """
import os, subprocess
from verl_ext import processes
processes.adopt_orphans()
subprocess.run(["sh", "-c", "sleep 600 &"])
print(len(processes.descendants(os.getpid())), processes.end_descendants(), len(processes.descendants(os.getpid())))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["1", "1", "0"]


def scratch(folder: Path, name: str) -> Path:
    path = folder / f"{SCRATCH_PREFIX}{name}"
    path.mkdir()
    return path


def train_for(seconds: float, folder: Path) -> str:
    """Return a program that trains in a folder for some seconds."""
    return (
        "from verl_ext.processes import *; import pathlib, time\n"
        f"ProcessBook(pathlib.Path({str(folder)!r}) / 'p.json').claim(pathlib.Path('/nowhere'))\n"
        f"print(1, flush=True); time.sleep({seconds})"
    )


def test_a_later_start_ends_what_a_crash_left_and_nothing_else(start: Start, tmp_path: Path) -> None:
    stranger, _ = start(FAMILY)
    left_over, _ = start(FAMILY)
    [mark] = [item for item in descendants(os.getpid()) if item.pid == left_over.pid]
    old = scratch(tmp_path, "old")
    path = tmp_path / "processes.json"
    book = {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "launcher": {"pid": 2**22 + 1, "started": 5},
        "processes": [{"pid": mark.pid, "started": mark.started}, {"pid": stranger.pid, "started": 5}],
        "scratch": str(old),
    }
    path.write_text(json.dumps(book))
    assert ProcessBook(path).claim(scratch(tmp_path, "new")) == 1
    assert not mark.alive
    assert not old.exists()
    assert stranger.poll() is None


@pytest.mark.slow
def test_a_launcher_that_is_ending_is_waited_for(start: Start, tmp_path: Path) -> None:
    other, _ = start(train_for(600, tmp_path))
    ending = threading.Timer(1.0, other.terminate)
    ending.start()
    assert ProcessBook(tmp_path / "p.json").claim(scratch(tmp_path, "new"), patience_s=300) == 0
    assert other.poll() == -signal.SIGTERM
    ending.join()


def test_a_folder_where_somebody_trains_is_refused(start: Start, tmp_path: Path) -> None:
    other, _ = start(train_for(600, tmp_path))
    with pytest.raises(ConfigError, match=f"process {other.pid} is training here"):
        ProcessBook(tmp_path / "p.json").claim(scratch(tmp_path, "new"), patience_s=0.5)


def test_only_scratch_folders_of_ours_are_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    path = tmp_path / "p.json"
    row = {"boot": "another", "launcher": {"pid": 1, "started": 1}, "processes": [], "scratch": str(precious)}
    path.write_text(json.dumps(row))
    ProcessBook(path).claim(scratch(tmp_path, "new"))
    assert precious.exists()


def test_the_book_names_the_launcher_and_goes_with_it(start: Start, tmp_path: Path) -> None:
    book = ProcessBook(tmp_path / "p.json")
    book.claim(scratch(tmp_path, "new"))
    assert json.loads((tmp_path / "p.json").read_text())["launcher"]["pid"] == this_process().pid
    process, _ = start(FAMILY)
    book.note_descendants()
    noted = {row["pid"] for row in json.loads((tmp_path / "p.json").read_text())["processes"]}
    assert process.pid in noted
    book.release()
    assert not (tmp_path / "p.json").exists()
