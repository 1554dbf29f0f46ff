"""The command line for nsjail, and the filter its launcher installs; nsjail itself is tested where it is."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from afm.errors import SandboxUnavailableError
from afm.sandbox import SandboxLimits, open_sandbox
from afm.sandbox.base import DEVICES
from afm.sandbox.interpreter import Identity, Interpreter
from afm.sandbox.jails import NsjailJail, nsjail_command, nsjail_config
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


@pytest.mark.sandbox
@pytest.mark.skipif(shutil.which("nsjail") is None, reason="nsjail is not installed")
async def test_what_nsjail_itself_writes_is_no_output_of_the_program(
    stand_in: Callable[[str, str], str],
) -> None:
    path = stand_in("nsjail", 'echo "no version information available" >&2\nexec REAL "$@"')
    sandbox = open_sandbox("nsjail", nsjail_path=path)
    result = await sandbox.run("import sys; print('mine', file=sys.stderr)")
    assert (result.stdout, result.stderr) == ("", "mine\n")
    await sandbox.close()


FLAGS = "--config --hostname --time_limit --quiet --disable_proc --disable_rlimits --iface_no_lo --pass_fd"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, r"nsjail was not found \(/nonexistent/nsjail\).*nsjail_path"),
        ("echo ' --config --hostname --time_limit --quiet'", "does not know --disable_proc, .*nsjail 3.4"),
        (
            f'[ "$1" = --help ] && echo "{FLAGS}" && exit 0\necho "no tmpfs here" >&2\nexit 255',
            "the jail did not start: no tmpfs here",
        ),
    ],
)
async def test_without_an_nsjail_that_works_nothing_runs(
    script: str | None, message: str, stand_in: Callable[[str, str], str]
) -> None:
    path = stand_in("nsjail", script) if script else "/nonexistent/nsjail"
    with pytest.raises(SandboxUnavailableError, match=message):
        await open_sandbox("nsjail", nsjail_path=path).run("print(1)")


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
