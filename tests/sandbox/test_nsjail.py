"""The command line for nsjail, and the filter its launcher installs; nsjail itself is tested where it is."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from afm.errors import SandboxUnavailableError
from afm.sandbox import SandboxLimits, open_sandbox
from afm.sandbox.interpreter import Identity, Interpreter
from afm.sandbox.nsjail import NsjailJail, NsjailSandbox, nsjail_command
from afm.sandbox.percall import launch
from afm.sandbox.policy import DEVICES
from afm.sandbox.seccomp import filter_program

PYTHON = Interpreter(
    binary="/usr/bin/python3.11",
    version=(3, 11),
    imports=("/packages/0",),
    binds=("/usr/lib/python3.11",),
    links=(("/lib", "usr/lib"),),
    packages=(("/opt/packages", "/packages/0"),),
)
JAIL = NsjailJail("/opt/nsjail", Identity(65534, 65534), PYTHON, ("/srv/data",), b"\x06\0\0\0\0\0\xff\x7f")


def test_the_command_line() -> None:
    limits = SandboxLimits(wall_s=7.5, file_bytes=4096, memory_bytes=1 << 20)
    command = nsjail_command(JAIL, limits, code=Path("/tmp/x/main.py"), stdin=Path("/tmp/x/stdin"))
    words = list(command)
    end = words.index("--")
    assert words[:4] == ["/opt/nsjail", "--mode", "o", "--really_quiet"]
    pairs = list(itertools.pairwise(words[:end]))
    for pair in [
        ("--user", "65534"),
        ("--group", "65534"),
        ("--cwd", "/tmp"),
        ("--time_limit", "97"),
        ("--pass_fd", "{report}"),
        ("--nice_level", str(os.getpriority(os.PRIO_PROCESS, 0))),
        ("--env", "PYTHONHASHSEED=0"),
        ("--bindmount_ro", "/usr/lib/python3.11"),
        ("--bindmount_ro", "/srv/data"),
        ("--bindmount_ro", "/dev/urandom"),
        ("--bindmount_ro", "/opt/packages:/packages/0"),
        ("--symlink", "usr/lib:/lib"),
        ("--mount", "none:/tmp:tmpfs:size=4096,nr_inodes=4096,mode=0755"),
        ("--mount", "none:/dev/shm:tmpfs:size=4096,nr_inodes=4096,mode=0755"),
        ("--bindmount_ro", "/tmp/x/main.py:/tmp/main.py"),
        ("--bindmount_ro", "/tmp/x/stdin:/dev/stdin"),
    ]:
        assert pair in pairs
    for flag in ("--disable_proc", "--disable_rlimits", "--iface_no_lo"):
        assert flag in words[:end]
    assert not {"--disable_clone_newnet", "--keep_caps", "--keep_env", "--rw", "--chroot"} & set(words)
    assert words.index("none:/tmp:tmpfs:size=4096,nr_inodes=4096,mode=0755") < words.index(
        "/tmp/x/main.py:/tmp/main.py"
    )
    inside = words[end + 1 :]
    assert inside[0] == "/usr/bin/python3.11"
    assert inside[-6:-4] == ["{report}", "/tmp/main.py"]
    assert "AS=1048576=1048576" in inside[-4]
    assert inside[-3:] == ["/packages/0", ":".join(DEVICES), "060000000000ff7f"]


async def test_without_nsjail_nothing_runs() -> None:
    with pytest.raises(
        SandboxUnavailableError, match=r"nsjail was not found \(/nonexistent/nsjail\).*nsjail_path"
    ):
        await open_sandbox("nsjail", nsjail_path="/nonexistent/nsjail").run("print(1)")


async def test_an_old_nsjail_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "nsjail"
    old.write_text(
        "#!/bin/sh\necho ' --bindmount_ro --symlink --mount --hostname --time_limit --really_quiet'\n"
    )
    old.chmod(0o755)
    with pytest.raises(SandboxUnavailableError, match=r"does not know --disable_proc, .*nsjail 3.1 or newer"):
        await NsjailSandbox(nsjail_path=str(old)).run("print(1)")


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
    python = Interpreter(sys.executable, (3, 11), (), (), ())
    reading, writing = os.pipe()
    words = {"{report}": str(writing), "/tmp/main.py": str(program)}
    command = [words.get(word, word) for word in launch(python, limits, rules)]
    done = subprocess.run(command, capture_output=True, text=True, pass_fds=(writing,), check=False)
    os.close(writing)
    with os.fdopen(reading, "rb") as report:
        first, second = report.read().decode().splitlines()
    assert (done.stdout, done.stderr) == (said, "")
    assert first == "ready"
    assert second.split()[0] == "0"
