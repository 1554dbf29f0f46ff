"""Memory groups: version 1 for real where it is writable, the choice of the folder on copies of the file system."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from afm.sandbox.usage import CpuGroup, MemoryGroup, RunGroups, cpu_groups, group_limit, run_groups


def test_the_limit_leaves_room_for_files() -> None:
    assert group_limit(1 << 30, 16 << 20) == (1 << 30) + (32 << 20) + (64 << 20)


def test_where_nothing_is_writable_it_says_so(tmp_path: Path) -> None:
    groups, (memory, cpu) = run_groups(2, tmp_path)
    assert groups == [RunGroups(), RunGroups()]
    assert memory.startswith("no memory cgroup is writable")
    assert "memory is limited per process" in memory
    assert cpu.startswith("no cgroup counts CPU time")


@pytest.fixture
def groups() -> Iterator[RunGroups]:
    (made,), _ = run_groups(1)
    yield made
    made.remove()


@pytest.fixture
def group(groups: RunGroups) -> MemoryGroup:
    if groups.memory is None:
        pytest.skip("no memory cgroup is writable")
    return groups.memory


@pytest.fixture
def cpu_group(groups: RunGroups) -> CpuGroup:
    if groups.cpu is None:
        pytest.skip("no cgroup counts CPU time")
    return groups.cpu


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV])
def test_a_group_that_is_removed_while_it_is_read_counts_nothing(
    group: MemoryGroup, cpu_group: CpuGroup, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The kernel says ENODEV where the file was opened before the group was removed."""

    def read_text(path: Path, encoding: str) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_text", read_text)
    assert group.kills() == 0
    assert cpu_group.used_s() == 0.0


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
    assert group.kills() == 0


def test_groups_of_a_dead_owner_are_removed_and_each_sandbox_has_its_own(group: MemoryGroup) -> None:
    parent = group.path.parent
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    stale = parent / f"afm-sandbox-{gone.stdout.strip()}-0"
    stale.mkdir()
    try:
        for made in run_groups(1)[0]:
            assert made.memory is not None
            assert made.memory.path != group.path
            made.remove()
        assert not stale.exists()
    finally:
        group.remove()
        if stale.exists():
            stale.rmdir()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of a cgroup of version 2."""
    made = tmp_path / "box"
    made.mkdir()
    for name in ("memory.max", "memory.swap.max", "cgroup.procs"):
        (made / name).touch()
    (made / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\n")
    return made


def test_version_2_files(tmp_path: Path, folder: Path) -> None:
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n")
    group = MemoryGroup(tmp_path, "box")
    group.limit(123456)
    group.add(os.getpid())
    assert group.kills() == 2
    assert (folder / "memory.max").read_text() == "123456"
    assert (folder / "memory.swap.max").read_text() == "0"
    assert (folder / "cgroup.procs").read_text() == str(os.getpid())


UNIFIED = Path("/sys/fs/cgroup/unified")


@pytest.fixture(params=["as found", "version 2"])
def counting(request: pytest.FixtureRequest) -> Iterator[CpuGroup]:
    """A group as the sandbox would make it here, and one of version 2 where that is mounted beside version 1."""
    if request.param == "as found":
        yield request.getfixturevalue("cpu_group")
        return
    if not (UNIFIED / "cgroup.controllers").exists() or not os.access(UNIFIED, os.W_OK):
        pytest.skip(f"{UNIFIED} is no writable cgroup of version 2")
    made = CpuGroup(UNIFIED, f"afm-sandbox-{os.getpid()}-test")
    yield made
    made.remove()


@pytest.mark.slow
def test_a_real_group_counts_the_time_of_processes_that_nobody_waits_for(counting: CpuGroup) -> None:
    code = """
import os, signal, sys, time
sys.stdin.read(1)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(2):
    if os.fork() == 0:
        while time.process_time() < 0.5: pass
        os._exit(0)
try: os.wait()
except ChildProcessError: pass
"""
    before = counting.used_s()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    counting.add(child.pid)
    child.communicate(b"x")
    assert 0.9 < counting.used_s() - before < 2
    counting.remove()
    assert not counting.path.exists()
    assert counting.used_s() == 0


def test_a_folder_that_counts_no_time_is_no_cpu_group(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cpu"):
        CpuGroup(tmp_path, "box")
    assert not (tmp_path / "box").exists()


@pytest.mark.usefixtures("folder")
def test_version_2_has_one_group_for_memory_and_time(tmp_path: Path) -> None:
    memory = MemoryGroup(tmp_path, "box")
    groups, said = cpu_groups([memory], 1, tmp_path)
    assert [(group.path, group.used_s()) for group in groups] == [(memory.path, 2.5)]
    assert said == f"CPU time is limited for the whole run: cgroup below {tmp_path}"
