"""Opening a sandbox by name and settings, and which one is taken where."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afm.errors import ConfigError, SandboxUnavailableError
from afm.sandbox import SandboxLimits, SandboxSettings, limits_from, open_sandbox
from afm.sandbox.interpreter import Identity, find_interpreter


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"wal_s": 3}, "wal_s: unknown key; did you mean 'wall_s'"),
        ({"cpu_s": 2.5}, "cpu_s: got 2.5 .*expected a whole number"),
        ({"wall_s": float("nan")}, "wall_s: got nan .*expected a finite number"),
        ({"cpu_s": 10**5000}, "cpu_s: got a number of thousands of digits"),
    ],
)
def test_wrong_limits_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limits_from(values)


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"backend": "bublewrap"}, "backend: got 'bublewrap' .*did you mean 'bubblewrap'"),
    ({"packages": "/usr"}, "packages: got '/usr' .*expected a list"),
    ({"packages": ["/usr/.."]}, "'/usr/..' would expose the host's own files"),
    ({"packages": ["opt/packages"]}, r"packages\[0\]: got 'opt/packages' .*expected an absolute path"),
    ({"binds": ["/"]}, "'/' would expose the host's own files"),
    ({"binds": ["/tmp"]}, "/tmp is hidden by the /tmp and /dev"),
    ({"binds": ["/dev/shm/data"]}, "/dev/shm/data is hidden by the /tmp and /dev"),
    ({"warm": ["numpy", "scipy"]}, r"warm\[0\]: got 'numpy' .*expected a list"),
    ({"backend": "bubblewrap", "warm": [["numpy"]]}, "warm: an option of auto and zygote, not of 'bubb"),
    ({"backend": "zygote", "nsjail_path": "/opt/nsjail"}, "nsjail_path: an option of nsjail, not of"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_options_of_the_wrong_kind_are_refused_before_anything_runs(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_sandbox(**options)


def test_a_path_that_leads_to_the_whole_host_by_now_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "packages"
    path.mkdir()
    settings = SandboxSettings(packages=(str(path),))
    path.rmdir()
    path.symlink_to("/")
    with pytest.raises(ConfigError, match="sandbox option packages"):
        find_interpreter(settings, Identity.for_process())


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("backend", "option"), [("auto", "binds"), ("zygote", "packages"), ("bubblewrap", "binds")]
)
async def test_what_is_not_there_is_named(backend: str, option: str) -> None:
    sandbox = open_sandbox(backend, **{option: ["/nonexistent/data"]})
    for _ in range(2):
        with pytest.raises(SandboxUnavailableError, match=f"{option}: /nonexistent/data does not exist, or "):
            await sandbox.run("print(1)")
    await sandbox.close()


def test_settings_of_a_file_are_the_options() -> None:
    assert limits_from({"wall_s": 3, "cpu_s": 2}) == SandboxLimits(wall_s=3, cpu_s=2)
    assert SandboxSettings().options() == {}
    settings = SandboxSettings.model_validate({"backend": "zygote", "warm": [["numpy"]], "start_s": 5})
    assert settings.options() == {"backend": "zygote", "warm": (("numpy",),), "start_s": 5.0}


LOW = """
import resource
from afm.sandbox import SandboxLimits
from afm.sandbox.base import kernel_limits
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 50))
resource.setrlimit(resource.RLIMIT_CPU, (4, 4))
limits = kernel_limits(SandboxLimits())
print(limits["NOFILE"], limits["CPU"], limits["FSIZE"])
"""


def test_limits_that_this_process_has_itself_are_not_raised() -> None:
    done = subprocess.run([sys.executable, "-c", LOW], capture_output=True, text=True, check=True)
    assert done.stdout == "(50, 50) (4, 4) (16777216, 16777216)\n"


@pytest.mark.sandbox
async def test_zygotes_where_they_work() -> None:
    sandbox = open_sandbox(max_parallel=1)
    assert (await sandbox.isolation())[0].startswith("zygote in ")
    assert (await sandbox.run("print(1)")).stdout == "1\n"
    await sandbox.close()


@pytest.fixture
def strict_kernel(stand_in: Callable[[str, str], str]) -> None:
    """A bubblewrap whose jails may not hold further user namespaces, as a kernel may be set to."""
    stand_in(
        "bwrap",
        'case "$*" in *--disable-userns*|*--help*) exec REAL "$@";; esac\nexec REAL --disable-userns "$@"',
    )


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.usefixtures("strict_kernel")
async def test_bubblewrap_where_namespaces_cannot_be_nested(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = open_sandbox(max_parallel=1, start_s=5.0)
    with caplog.at_level(logging.WARNING):
        assert [(await sandbox.run("print(1)")).stdout for _ in range(2)] == ["1\n"] * 2
    assert (await sandbox.isolation())[0].startswith("bubblewrap")
    await sandbox.close()
    said = [record.getMessage() for record in caplog.records if "own bubblewrap jail" in record.getMessage()]
    assert len(said) == 1
    assert "no zygote works here" in said[0]


@pytest.mark.sandbox
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


@pytest.mark.sandbox
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
