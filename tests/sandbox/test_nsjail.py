"""The command line for nsjail, and the filter its launcher installs; nsjail itself is tested where it is."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_tree import descendants

from afm.errors import SandboxUnavailableError
from afm.sandbox import SandboxLimits, open_sandbox
from afm.sandbox.base import DEVICES
from afm.sandbox.interpreter import Identity, Interpreter
from afm.sandbox.nsjail import NsjailJail, nsjail_command, nsjail_config
from afm.sandbox.percall import Jail, launch
from afm.sandbox.seccomp import filter_program

PYTHON = Interpreter(
    binary="/usr/bin/python3.11",
    version=(3, 11),
    imports=("/packages/0",),
    binds=("/usr/lib/python3.11",),
    links=(("/lib", "usr/lib"),),
    packages=(("/opt/packages", "/packages/0"),),
)
JAIL = NsjailJail("/opt/nsjail", Identity(65534, 65534), PYTHON, b"\x06\0\0\0\0\0\xff\x7f", ("/srv/data",))


def test_the_command_line() -> None:
    limits = SandboxLimits(wall_s=7.5, file_bytes=4096, memory_bytes=1 << 20)
    words = list(nsjail_command(JAIL, limits, code=8, config=9))
    end = words.index("--")
    assert words[:5] == ["/opt/nsjail", "--config", "/proc/self/fd/9", "--mode", "o"]
    pairs = list(itertools.pairwise(words[:end]))
    for pair in [
        ("--user", "65534"),
        ("--group", "65534"),
        ("--cwd", "/tmp"),
        ("--time_limit", "97"),
        ("--pass_fd", "{report}"),
        ("--pass_fd", "{stderr}"),
        ("--pass_fd", "8"),
        ("--nice_level", str(os.getpriority(os.PRIO_PROCESS, 0))),
        ("--env", "PYTHONHASHSEED=0"),
    ]:
        assert pair in pairs
    for flag in ("--disable_proc", "--disable_rlimits", "--iface_no_lo"):
        assert flag in words[:end]
    assert not {"--disable_clone_newnet", "--keep_caps", "--keep_env", "--rw", "--chroot"} & set(words)
    inside = words[end + 1 :]
    assert inside[0] == "/usr/bin/python3.11"
    assert inside[-8:-6] == ["{report}", "/tmp/main.py"]
    assert "AS=1048576=1048576" in inside[-6]
    assert inside[-5:] == ["/packages/0", ":".join(DEVICES), "060000000000ff7f", "8", "{stderr}"]


def test_the_mounts() -> None:
    mounts = nsjail_config(JAIL, SandboxLimits(file_bytes=4096), b'"a\\\n\xff').splitlines()
    bind = "is_bind: true nosuid: true nodev"
    assert mounts == [
        'mount { dst: "/" fstype: "tmpfs" nosuid: true nodev: true }',
        f'mount {{ src: "/usr/lib/python3.11" dst: "/usr/lib/python3.11" {bind}: true }}',
        f'mount {{ src: "/srv/data" dst: "/srv/data" {bind}: true }}',
        *(f'mount {{ src: "{device}" dst: "{device}" {bind}: false }}' for device in DEVICES),
        f'mount {{ src: "/opt/packages" dst: "/packages/0" {bind}: true }}',
        'mount { src: "usr/lib" dst: "/lib" is_symlink: true }',
        *(
            f'mount {{ dst: "{at}" fstype: "tmpfs" options: "size=4096,nr_inodes=4096,mode=0755" rw: true '
            "nosuid: true nodev: true }"
            for at in ("/tmp", "/dev/shm")
        ),
        r'mount { src_content: "\042a\134\012\377" dst: "/dev/stdin" nosuid: true nodev: true }',
    ]
    without = nsjail_config(JAIL, SandboxLimits(), b"").splitlines()
    assert without[-1] == f'mount {{ src: "/dev/null" dst: "/dev/stdin" {bind}: false }}'


OWNER = """
import asyncio
from afm.sandbox import open_sandbox
asyncio.run(open_sandbox("nsjail", limits={"wall_s": 60}).run("print('begun'); import time; time.sleep(60)"))
"""


@pytest.mark.sandbox
@pytest.mark.skipif(shutil.which("nsjail") is None, reason="nsjail is not installed")
def test_an_owner_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    """Nothing of a run is a file of the host, and the run ends with its owner."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", OWNER], env=environment) as owner:
        try:
            while not (programs := descendants(owner.pid)[2:]):  # all but nsjail and the launcher
                assert owner.poll() is None
                time.sleep(0.05)
        finally:
            owner.kill()
    assert list(folder.iterdir()) == []
    for _ in range(200):
        if not any(Path("/proc", process).exists() for process in programs):
            return
        time.sleep(0.05)
    pytest.fail(f"processes {programs} outlived their owner")


@pytest.fixture
def instead() -> Iterator[Callable[[str], str]]:
    """Makes a shell script that stands for nsjail, readable by every user, and gives its path."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)

        def make(script: str) -> str:
            path = Path(folder, "nsjail")
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
            return str(path)

        yield make


@pytest.mark.sandbox
@pytest.mark.skipif(shutil.which("nsjail") is None, reason="nsjail is not installed")
async def test_what_nsjail_itself_writes_is_no_output_of_the_program(instead: Callable[[str], str]) -> None:
    path = instead(f'echo "no version information available" >&2\nexec {shutil.which("nsjail")} "$@"')
    sandbox = open_sandbox("nsjail", nsjail_path=path)
    result = await sandbox.run("import sys; print('mine', file=sys.stderr)")
    assert (result.stdout, result.stderr) == ("", "mine\n")
    await sandbox.close()


async def test_a_jail_that_does_not_start_is_quoted(instead: Callable[[str], str]) -> None:
    flags = (
        "--config --hostname --time_limit --quiet --disable_proc --disable_rlimits --iface_no_lo --pass_fd"
    )
    path = instead(f'[ "$1" = --help ] && echo "{flags}" && exit 0\necho "no tmpfs here" >&2\nexit 255')
    with pytest.raises(SandboxUnavailableError, match="the jail did not start: no tmpfs here"):
        await open_sandbox("nsjail", nsjail_path=path).run("print(1)")


async def test_without_nsjail_nothing_runs() -> None:
    with pytest.raises(
        SandboxUnavailableError, match=r"nsjail was not found \(/nonexistent/nsjail\).*nsjail_path"
    ):
        await open_sandbox("nsjail", nsjail_path="/nonexistent/nsjail").run("print(1)")


async def test_an_old_nsjail_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "nsjail"
    old.write_text("#!/bin/sh\necho ' --config --hostname --time_limit --quiet'\n")
    old.chmod(0o755)
    with pytest.raises(SandboxUnavailableError, match=r"does not know --disable_proc, .*nsjail 3.4 or newer"):
        await open_sandbox("nsjail", nsjail_path=str(old)).run("print(1)")


PROGRAM = """
import os, socket
try: socket.socket(); print("a socket")
except PermissionError: print("no socket")
print(open("/proc/self/status").read().partition("Seccomp:")[2].split()[0])
"""


@pytest.mark.parametrize(("rules", "said"), [(filter_program(), "no socket\n2\n"), (b"", "a socket\n0\n")])
def test_the_launcher_installs_the_filter(rules: bytes, said: str, tmp_path: Path) -> None:
    program = tmp_path / "main.py"
    program.write_text(PROGRAM)
    limits = SandboxLimits(processes=30_000, open_files=4096)
    jail = Jail("bwrap", Identity(), Interpreter(sys.executable, (3, 11), (), (), ()), rules)
    reading, writing = os.pipe()
    words = {"{report}": str(writing), "/tmp/main.py": str(program)}
    command = [words.get(word, word) for word in launch(jail, limits, rules=rules)]
    done = subprocess.run(command, capture_output=True, text=True, pass_fds=(writing,), check=False)
    os.close(writing)
    with os.fdopen(reading, "rb") as report:
        first, second = report.read().decode().splitlines()
    assert (done.stdout, done.stderr) == (said, "")
    assert first == "ready"
    assert second.split()[0] == "0"
