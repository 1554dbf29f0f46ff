"""Which sandbox is taken where."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from afm.errors import SandboxUnavailableError
from afm.sandbox import open_sandbox

pytestmark = pytest.mark.sandbox


async def test_zygotes_where_they_work() -> None:
    sandbox = open_sandbox(max_parallel=1)
    assert (await sandbox.isolation())[0].startswith("zygote in ")
    assert (await sandbox.run("print(1)")).stdout == "1\n"
    await sandbox.close()


@pytest.fixture
def strict_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bubblewrap whose jails may not hold further user namespaces, as a kernel may be set to."""
    real = next(Path(folder, "bwrap") for folder in os.get_exec_path() if Path(folder, "bwrap").exists())
    strict = tmp_path / "bwrap"
    strict.write_text(
        f'#!/bin/sh\ncase "$*" in *--disable-userns*|*--help*) exec {real} "$@";; esac\nexec {real} --disable-userns "$@"\n'
    )
    strict.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.stat().st_uid == os.getuid() and folder != Path("/tmp"):
            folder.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.usefixtures("strict_kernel")
async def test_bubblewrap_where_namespaces_cannot_be_nested(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = open_sandbox(max_parallel=1, start_s=5.0)
    with caplog.at_level(logging.WARNING):
        assert [(await sandbox.run("print(1)")).stdout for _ in range(2)] == ["1\n"] * 2
    assert (await sandbox.isolation())[0].startswith("bubblewrap")
    await sandbox.close()
    said = [record.getMessage() for record in caplog.records if "jail each" in record.getMessage()]
    assert len(said) == 1
    assert "no zygote works here" in said[0]


@pytest.mark.usefixtures("strict_kernel")
async def test_zygotes_by_name_are_not_replaced_in_silence() -> None:
    with pytest.raises(SandboxUnavailableError, match=r"no zygote works here: .*backend 'bubblewrap'"):
        await open_sandbox("zygote").run("print(1)")


ORDINARY = """
import asyncio
from afm.sandbox import SandboxLimits, open_sandbox
async def main():
    sandbox = open_sandbox("zygote", max_parallel=1)
    print((await sandbox.run("import os; print(os.getuid())")).stdout, end="")
    print((await sandbox.run("while True: pass", limits=LIMITS)).reason)
    await sandbox.close()
LIMITS = SandboxLimits(cpu_s=1)
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_has_zygotes_too() -> None:
    """With an id that no account has, and no means of root's."""
    root = Path(__file__).resolve().parents[2]
    command = ["/usr/bin/python3", "-B", "-c", ORDINARY]
    if not all(folder.stat().st_mode & 0o005 == 0o005 for folder in (root, *root.parents)):
        pytest.skip(f"{root} is not readable by other users")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        user=12345,
        group=12345,
        extra_groups=[],
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )
    if "ModuleNotFoundError" in done.stderr or sys.version_info[:2] != (3, 11):
        pytest.skip("the system's Python lacks what this package imports")
    assert (done.stdout, done.stderr) == ("12345\ncpu\n", "")
