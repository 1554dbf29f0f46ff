import fcntl
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from afm.processes import run_logged


def logged(code, tmp_path, *, watch=None):
    log = tmp_path / "run.log"
    command = [sys.executable, "-c", code]
    status = run_logged(command, env=os.environ, log_path=log, keep_open=(), watch=watch)
    return status, log.read_text("utf-8")


def test_output_is_logged_and_shown(tmp_path, capsys):
    code = "import sys; print('Größe'); print('to stderr', file=sys.stderr); sys.stdout.write('no end')"
    status, log = logged(code, tmp_path)
    assert status == 0
    assert sorted(log.splitlines()) == ["Größe", "no end", "to stderr"]
    assert sorted(capsys.readouterr().out.splitlines()) == ["Größe", "no end", "to stderr"]


def test_of_a_progress_bar_the_log_keeps_the_end(tmp_path, capsys):
    seen = []
    watch = lambda: seen.append((tmp_path / "run.log").read_text("utf-8"))  # noqa: E731
    status, log = logged(r"print('\r 1/3\r 2/3\r 3/3\r\n next')", tmp_path, watch=watch)
    assert (status, log) == (0, " 3/3\n next\n")
    assert capsys.readouterr().out == ""
    assert seen[-1] == log


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_status_is_the_childs(tmp_path, code, status):
    assert logged(code, tmp_path)[0] == status


CHILD = """
import pathlib, signal, sys, time
from afm.processes import follow_parent
import os
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores Ctrl-C
follow_parent()
try:
    print(os.getpid(), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path("interrupted").touch()
    raise SystemExit(5)
"""

PARENT = """
import os, pathlib, signal, sys
from afm.processes import run_logged
signal.signal(signal.SIGINT, signal.default_int_handler)
command = [sys.executable, "-c", pathlib.Path("child.py").read_text()]
sys.exit(run_logged(command, env=os.environ, log_path=pathlib.Path("log"), keep_open=(), watch=lambda: None))
"""


@pytest.fixture
def family(request, tmp_path):
    """A parent that runs a child, once the child is up."""
    (tmp_path / "child.py").write_text(getattr(request, "param", CHILD), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (tmp_path / "stderr").open("wb") as stderr:
        parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, env=env, stderr=stderr)
    yield parent, logged_pid(tmp_path / "log"), tmp_path
    parent.kill()
    parent.wait()


def logged_pid(log):
    """Return the child's id, once the parent has logged it, and so receives Ctrl-C for it."""
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    return int(log.read_text())


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_ctrl_c_reaches_the_child_once_and_its_status_comes_back(family):
    parent, child, folder = family
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=30) == 5
    assert (folder / "interrupted").exists()
    assert not alive(child)
    assert (folder / "stderr").read_text() == "\nstopping; Ctrl-C again ends it at once\n"


def test_ctrl_c_is_passed_on_if_nobody_reads_standard_error(tmp_path):
    (tmp_path / "child.py").write_text(CHILD, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    reading, writing = os.pipe()
    os.close(reading)
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, env=env, stderr=writing)
    os.close(writing)
    logged_pid(tmp_path / "log")
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=30) == 5


@pytest.mark.parametrize("family", [CHILD.replace("raise SystemExit(5)", "time.sleep(60)")], indirect=True)
def test_a_second_ctrl_c_kills_a_child_that_is_slow_to_stop_and_counts_as_an_interruption(family):
    parent, child, folder = family
    parent.send_signal(signal.SIGINT)
    wait_until((folder / "interrupted").exists)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=30) == 128 + signal.SIGINT
    assert not alive(child)
    assert (folder / "stderr").read_text() == "\nstopping; Ctrl-C again ends it at once\n"


def test_a_second_ctrl_c_counts_while_the_first_is_being_answered(tmp_path):
    (tmp_path / "child.py").write_text(
        CHILD.replace("raise SystemExit(5)", "time.sleep(60)"), encoding="utf-8"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    reading, writing = os.pipe()
    # The answer to the first Ctrl-C waits for room in the pipe.
    os.write(writing, b"." * fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ))
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, env=env, stderr=writing)
    os.close(writing)
    try:
        child = logged_pid(tmp_path / "log")
        parent.send_signal(signal.SIGINT)
        wait_until((tmp_path / "interrupted").exists)
        while alive(child):  # one that comes just before the answer begins to wait is seen after it
            parent.send_signal(signal.SIGINT)
            time.sleep(0.05)
        with os.fdopen(reading, "rb") as stderr:
            assert stderr.read().lstrip(b".") == b"\nstopping; Ctrl-C again ends it at once\n"
        assert parent.wait(timeout=30) == 128 + signal.SIGINT
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the kernel's parent-death signal")
def test_a_child_dies_with_a_parent_that_is_killed(family):
    parent, child, _ = family
    assert alive(child)
    parent.kill()
    wait_until(lambda: not alive(child))
