"""Memory groups: version 1 for real where it is writable, the choice of the folder on copies of the file system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from afm.sandbox.cgroup import MemoryGroup, group_limit, memory_groups


def test_the_limit_leaves_room_for_files() -> None:
    assert group_limit(1 << 30, 16 << 20) == (1 << 30) + (32 << 20) + (64 << 20)


def test_where_nothing_is_writable_it_says_so(tmp_path: Path) -> None:
    groups, said = memory_groups(2, tmp_path)
    assert groups == []
    assert said.startswith("no memory cgroup is writable")
    assert "memory is bounded for each process" in said


@pytest.fixture
def group() -> MemoryGroup:
    groups, said = memory_groups(1)
    if not groups:
        pytest.skip(said)
    return groups[0]


def test_a_real_group_kills_what_takes_too_much(group: MemoryGroup) -> None:
    code = "import sys; sys.stdin.read(1); x = bytearray(200 << 20); print(len(x))"
    try:
        group.limit(100 << 20)
        assert group.kills() == 0
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        group.add(child.pid)
        out, _ = child.communicate(b"x")
        assert (child.returncode, out) == (-9, b"")
        assert group.kills() == 1
    finally:
        group.remove()
    assert not group.path.exists()


def test_groups_of_a_dead_owner_are_removed(group: MemoryGroup) -> None:
    parent = group.path.parent
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    stale = parent / f"afm-sandbox-{gone.stdout.strip()}-0"
    stale.mkdir()
    try:
        for made in memory_groups(1)[0]:
            made.remove()
        assert not stale.exists()
    finally:
        group.remove()
        if stale.exists():
            stale.rmdir()


def test_version_2_files(tmp_path: Path) -> None:
    folder = tmp_path / "box"
    folder.mkdir()
    for name in ("memory.max", "memory.swap.max", "cgroup.procs"):
        (folder / name).touch()
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n")
    group = MemoryGroup(tmp_path, "box")
    group.limit(123456)
    group.add(os.getpid())
    assert group.kills() == 2
    assert (folder / "memory.max").read_text() == "123456"
    assert (folder / "memory.swap.max").read_text() == "0"
    assert (folder / "cgroup.procs").read_text() == str(os.getpid())
