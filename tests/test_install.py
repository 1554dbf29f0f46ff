"""What ``requirements/install-cpu.sh`` shows. A shell script stands for Python and pip: the real ones take minutes and a network."""

import os
import pty
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOCKED = re.findall("^[A-Za-z0-9]", (ROOT / "requirements/cpu.txt").read_text(encoding="utf-8"), re.MULTILINE)
TOTAL = len(LOCKED) + 4  # with torch, pip, setuptools and wheel
PROGRESS = re.compile(rf"      [1-9]\d* s, 1 packages fetched, 1 of {TOTAL} installed")
STAND_IN = """#!/bin/bash
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" "$3/lib/python3.11/site-packages"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/afm" ;;
  *" config list") [ -z "$CONFIGURED" ] || { echo "global.index-url='https://mirror.example/simple'" && seq 99999; } ;;
  "-c import sys;"*) echo "${VERSION:-3.11.7}"; [ -z "$VERSION" ] ;;
  "-c "*) [ -z "$UNREACHABLE" ] ;;
  *" torch=="*) echo "$*" ;;
  *" -r "*) echo "Collecting alpha==1"; echo "WARNING: a mirror is slow"; mkdir "$(dirname "$0")/../lib/python3.11/site-packages/alpha-1.dist-info"
            if [ -n "$BROKEN" ]; then echo "ERROR: no such package alpha"; exit 3; fi
            until [ -e "$SEEN" ]; do sleep .05; done ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The two files that the script reads, itself, and a Python that installs nothing."""
    (tmp_path / "requirements").mkdir()
    for name in ("install-cpu.sh", "cpu.txt"):
        shutil.copy(ROOT / "requirements" / name, tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    program = tmp_path / "python-of-nothing"
    program.write_text(STAND_IN, encoding="utf-8")
    program.chmod(0o755)
    return tmp_path


def variables(checkout: Path, **more: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHON": str(checkout / "python-of-nothing"),
        "SEEN": str(checkout / "seen"),
        **more,
    }


def install(checkout: Path, **more: str) -> subprocess.CompletedProcess[str]:
    script = checkout / "requirements/install-cpu.sh"
    return subprocess.run(
        [script], env=variables(checkout, **more), capture_output=True, text=True, check=False
    )


def shown(checkout: Path, stream: int, program: "subprocess.Popen[bytes]") -> str:
    """What the script writes. Its third step goes on once its progress is seen, however slow the machine."""
    text = b""
    try:
        while piece := os.read(stream, 4096):
            text += piece
            if PROGRESS.search(text.decode()):
                (checkout / "seen").touch()
    except OSError:  # a terminal whose other end is closed
        pass
    program.wait()
    return text.decode()


needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed, and apt-get would install it"
)


@needs_bwrap
def test_a_log_file_gets_a_line_a_step_and_what_is_done_meanwhile(checkout: Path) -> None:
    script = checkout / "requirements/install-cpu.sh"
    with subprocess.Popen(
        [script],
        env=variables(checkout, PROGRESS_S="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        text = shown(checkout, process.stdout.fileno(), process)
    assert process.returncode == 0
    lines = text.splitlines()
    assert lines[0].startswith(f"Installing {TOTAL} packages into .venv: 3 GB of disk")
    steps = [line for line in lines if line.startswith("[")]
    assert [step[:5] for step in steps] == [f"[{n}/5]" for n in range(1, 6)]
    assert steps[2] == "[3/5] the packages of requirements/cpu.txt"
    assert any(PROGRESS.match(line) and line.endswith(", Collecting alpha==1") for line in lines)
    assert "\r" not in text
    assert "\x1b" not in text
    again = install(checkout)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


@needs_bwrap
def test_a_terminal_gets_one_line_that_is_rewritten(checkout: Path) -> None:
    ours, theirs = pty.openpty()
    script = checkout / "requirements/install-cpu.sh"
    with subprocess.Popen([script], env=variables(checkout), stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = shown(checkout, ours, process)
    os.close(ours)
    assert process.returncode == 0
    assert re.search(r"\r\x1b\[K" + PROGRESS.pattern, text)
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) < 90


@needs_bwrap
@pytest.mark.parametrize(
    ("variables", "index"),
    [
        ({}, "https://download.pytorch.org/whl/cpu"),
        ({"UNREACHABLE": "1"}, None),
        ({"CONFIGURED": "1"}, None),
        ({"CONFIGURED": "1", "TORCH_INDEX": "https://torch.example"}, "https://torch.example"),
    ],
)
def test_torch_comes_without_cuda_if_pip_has_no_other_index(
    checkout: Path, variables: dict[str, str], index: str | None
) -> None:
    (checkout / "seen").touch()
    assert install(checkout, **variables).returncode == 0
    (line,) = re.findall(".* torch==.*", (checkout / ".venv/install.log").read_text(encoding="utf-8"))
    assert line.endswith(f"--index-url {index} torch==2.13.0" if index else "off torch==2.13.0")


@needs_bwrap
def test_a_step_that_fails_ends_the_installation_with_its_status_and_the_end_of_the_log(
    checkout: Path,
) -> None:
    done = install(checkout, BROKEN="1")
    assert done.returncode == 3
    assert "error: this step ended with status 3: the packages of requirements/cpu.txt\n" in done.stderr
    assert "The last lines of .venv/install.log:\n" in done.stderr
    assert done.stderr.endswith("ERROR: no such package alpha\n")
    assert not (checkout / ".venv/.lock").exists()


@pytest.mark.parametrize(
    ("variables", "python", "got"),
    [
        ({"PYTHON": "python-that-is-not-there"}, "python-that-is-not-there", "a program that does not start"),
        ({"PYTHON": "false"}, "false", "a program that does not start"),
        ({"VERSION": "3.10.13"}, "{checkout}/python-of-nothing", "3.10.13"),
    ],
)
def test_another_python_is_refused_before_anything_is_installed(
    checkout: Path, variables: dict[str, str], python: str, got: str
) -> None:
    done = install(checkout, **variables)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {python.format(checkout=checkout)}: expected Python 3.11 or 3.12, got {got}; "
        "install Python 3.11 with venv, and put PYTHON=python3.11 before the command\n"
    )
    assert not (checkout / ".venv").exists()
