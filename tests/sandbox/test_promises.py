"""How runs end, what they leave behind, and what the sandbox promises to its callers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from busy_core import busy_core, pinned
from process_tree import descendants, ended

from afm.errors import DataError, SandboxError, SandboxUnavailableError
from afm.sandbox import ExitReason, NamelessInput, RunResult, Sandbox, SandboxLimits, open_sandbox

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def sandbox(backend: str) -> Iterator[Sandbox]:
    made = open_sandbox(backend, limits=SandboxLimits(wall_s=10.0, cpu_s=5))
    yield made
    asyncio.run(made.close())


async def test_a_program_runs_as_main_with_its_input(sandbox: Sandbox) -> None:
    code = "import sys\nprint(__name__, sys.argv, input(), sys.stdin.read())\nprint('to stderr', file=sys.stderr)"
    result = await sandbox.run(code, "héllo\nrest")
    assert result.stdout == "__main__ ['/tmp/main.py'] héllo rest\n"
    assert result.stderr == "to stderr\n"
    assert (result.reason, result.exit_status) == (ExitReason.OK, 0)
    assert not result.stdout_cut
    assert not result.stderr_cut
    assert 0 < result.cpu_s < result.wall_s + 1
    assert result.peak_memory_bytes is not None
    assert 4 << 20 < result.peak_memory_bytes < 64 << 20


async def test_stdin_is_also_a_file_and_may_be_empty(sandbox: Sandbox) -> None:
    assert (await sandbox.run("print(open('/dev/stdin').read() * 2)", "ab")).stdout == "abab\n"
    assert (await sandbox.run("import sys\nprint(repr(sys.stdin.read()))")).stdout == "''\n"
    nameless = "import sys\nprint(repr(open('/dev/stdin').read()), sys.stdin.read())"
    assert (await sandbox.run(nameless, NamelessInput("ab"))).stdout == "'' ab\n"


USUAL = {
    "a loop, threads, processes and files": (
        """
import asyncio, multiprocessing, os, subprocess, sys, threading, zoneinfo, sqlite3, decimal
async def answer():
    await asyncio.sleep(0.01)
    return 42
print(asyncio.run(answer()))
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout, end="")
with multiprocessing.Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
open("note.txt", "w").write("kept for this run"); print(open("/tmp/note.txt").read())
gate = threading.Barrier(25)  # many threads fit into the usual memory limit
for _ in range(24): threading.Thread(target=gate.wait).start()
gate.wait(); exit()
""",
        "42\nthread\nchild\n[1, 2]\nkept for this run\n",
    ),
    "devices, copies, databases and locks, as far as the policy goes": (
        """
import errno, fcntl, os, shutil, socket, sqlite3, subprocess, sys, tempfile
print("gone", file=open("/dev/null", "w"))
subprocess.run([sys.executable, "-c", "print(1)"], stdout=subprocess.DEVNULL, check=True)
with tempfile.TemporaryDirectory() as folder:
    copied = shutil.copy2(os.__file__, folder)
    print(os.stat(copied).st_mtime == os.stat(os.__file__).st_mtime)
    for mode in ("delete", "wal"):
        base = sqlite3.connect(os.path.join(folder, mode))
        base.execute("pragma journal_mode=" + mode); base.execute("create table t (n)")
        base.execute("insert into t values (7)"); base.commit()
        print(base.execute("select n from t").fetchall()); base.close()
print(os.path.exists(folder))
with tempfile.NamedTemporaryFile() as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        print(errno.errorcode[error.errno])
left, right = socket.socketpair()
left.sendall(b"hello"); print(right.recv(9))
""",
        "True\n[(7,)]\n[(7,)]\nFalse\nENOSYS\nb'hello'\n",
    ),
    "numbers to which four processes add": (
        """
import fcntl, multiprocessing, sqlite3
def add(lock):
    base = sqlite3.connect("base", timeout=20)
    for _ in range(25):
        with open("number", "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            value = int(file.read()); file.seek(0); file.write(str(value + 1)); file.flush()
        with lock:
            value = int(open("other").read()); open("other", "w").write(str(value + 1))
        base.execute("begin immediate"); base.execute("update t set n = n + 1"); base.commit()
for name in ("number", "other"):
    open(name, "w").write("0")
base = sqlite3.connect("base"); base.execute("create table t (n)"); base.execute("insert into t values (0)"); base.commit()
lock = multiprocessing.Lock()
processes = [multiprocessing.Process(target=add, args=(lock,)) for _ in range(4)]
for process in processes: process.start()
for process in processes: process.join()
print(open("number").read(), open("other").read(), base.execute("select n from t").fetchone())
""",
        "100 100 (100,)\n",
    ),
    "the usual packages": (
        """
import numpy, pandas, scipy.optimize, sympy
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
print(numpy.linalg.inv(numpy.eye(2)).sum(), sympy.factor("x**2 - 1"), scipy.optimize.brentq(lambda x: x - 2, 0, 5))
frame = pandas.DataFrame({"a": [1, 2]}); frame.to_csv("a.csv"); print(pandas.read_csv("a.csv")["a"].sum())
numpy.savez("b.npz", x=numpy.arange(3)); print(numpy.load("b.npz", mmap_mode="r")["x"].sum())
with ProcessPoolExecutor(2) as processes, ThreadPoolExecutor(2) as threads:
    print(list(processes.map(abs, [-1, -2])), list(threads.map(abs, [-3])))
""",
        "2.0 (x - 1)*(x + 1) 2.0\n3\n3\n[1, 2] [3]\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", USUAL)
async def test_what_programs_usually_need_works(what: str, sandbox: Sandbox) -> None:
    code, printed = USUAL[what]
    result = await sandbox.run(code, limits=SandboxLimits(wall_s=30, cpu_s=20))
    if "ModuleNotFoundError" in result.stderr:
        pytest.skip("the sandbox has no packages: afm sandbox install")
    assert (result.stdout, result.stderr) == (printed, "")


async def test_the_same_program_prints_the_same(sandbox: Sandbox) -> None:
    code = "print({'apple', 'pear', 'plum', 'fig'})"
    assert (await sandbox.run(code)).stdout == (await sandbox.run(code)).stdout


def test_a_device_that_a_process_of_the_host_has_locked_stops_no_run(tmp_path: Path) -> None:
    """Regression: a writer's lock on one byte of the host's /dev/null, which anyone can take, stopped every sandbox."""
    device = tmp_path / "device"
    device.touch()
    code = f"from afm.sandbox.inside.harden import harden; harden([{str(device)!r}]); print('ready')"
    with device.open("r+b") as held:
        fcntl.lockf(held, fcntl.LOCK_EX, 1, 7)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("ready\n", "")


@pytest.mark.parametrize(
    ("code", "status", "last"),
    [
        ("1/0", 1, "ZeroDivisionError: division by zero"),
        ("x = ", 1, "SyntaxError: invalid syntax"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no luck')", 1, "no luck"),
        ("import ctypes; ctypes.string_at(0)", -11, ""),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
    ],
)
async def test_a_failing_program(code: str, status: int, last: str, sandbox: Sandbox) -> None:
    result = await sandbox.run(code)
    assert (result.reason, result.exit_status) == (ExitReason.ERROR, status)
    assert result.stderr.rstrip().rpartition("\n")[2] == last


async def test_a_traceback_shows_the_program_only(sandbox: Sandbox) -> None:
    result = await sandbox.run("def f():\n    return [][0]\n\nf()\n")
    assert result.stderr.splitlines() == [
        "Traceback (most recent call last):",
        '  File "main.py", line 4, in <module>',
        "    f()",
        '  File "main.py", line 2, in f',
        "    return [][0]",
        "           ~~^^^",
        "IndexError: list index out of range",
    ]


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("x = b'x' * (300 << 20)", ""),
        (
            "def load(): return list(range(10 ** 8))\ntry: load()\nexcept MemoryError: print('tidy'); raise",
            "tidy\n",
        ),
    ],
)
async def test_too_much_memory(code: str, printed: str, sandbox: Sandbox) -> None:
    result = await sandbox.run(code, limits=SandboxLimits(memory_bytes=200 << 20))
    assert (result.reason, result.exit_status, result.stdout) == (ExitReason.MEMORY, None, printed)
    assert result.stderr.rstrip().endswith("MemoryError")


async def test_output_at_the_limit_is_whole_and_one_byte_more_is_cut(sandbox: Sandbox) -> None:
    limits = SandboxLimits(output_bytes=1000)
    whole = await sandbox.run("print('x' * 999)", limits=limits)
    assert (whole.reason, len(whole.stdout), whole.stdout_cut) == (ExitReason.OK, 1000, False)
    cut = await sandbox.run("print('x' * 1000)", limits=limits)
    assert (cut.reason, len(cut.stdout), cut.stdout_cut) == (ExitReason.OUTPUT, 1000, True)
    errors = await sandbox.run("import os\nwhile True: os.write(2, b'y' * 65536)", limits=limits)
    assert (errors.reason, len(errors.stderr), errors.stderr_cut) == (ExitReason.OUTPUT, 1000, True)
    assert (await sandbox.run("print('€' * 400)", limits=limits)).stdout == "€" * 333  # no character is split


async def test_sizes_beyond_the_limits_are_refused_before_anything_runs(sandbox: Sandbox) -> None:
    with pytest.raises(DataError, match="stdin is 11 bytes long, expected at most 10"):
        await sandbox.run("print(1)", "x" * 11, SandboxLimits(stdin_bytes=10))
    with pytest.raises(DataError, match="the program is"):
        await sandbox.run("#" * 2000, limits=SandboxLimits(file_bytes=1000))


@pytest.mark.slow
async def test_a_busy_loop_ends_at_the_cpu_limit(sandbox: Sandbox) -> None:
    result = await sandbox.run("while True: pass", limits=SandboxLimits(cpu_s=1, wall_s=30))
    assert (result.reason, result.exit_status) == (ExitReason.CPU, None)
    assert 0.5 < result.cpu_s < 3  # the kernel counts ticks for the limit, and time for the report
    assert result.idle_s < result.wall_s / 2  # its processes were found, wherever they run


async def test_a_program_stopped_by_the_wall_clock_leaves_its_cpu_time_and_its_whole_lines(
    sandbox: Sandbox,
) -> None:
    code = (
        "import time\nprint('step 1')\nprint('step 2')\nprint('half', end='')\n"
        "while time.process_time() < 0.1: pass\ntime.sleep(60)"
    )
    result = await sandbox.run(code, limits=SandboxLimits(wall_s=2.0))
    assert (result.reason, result.exit_status) == (ExitReason.TIMEOUT, None)
    assert result.stdout == "step 1\nstep 2\n"
    assert 2 <= result.wall_s < 60
    assert result.cpu_s > 0.06  # the jail alone takes about 0.02


CANARY = f"afm-daemon-{secrets.token_hex(4)}"
"""First word of the command line of daemons. Tests that run in another process at the same time have their own."""
DAEMON = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [{CANARY!r}, "-c", "import time; time.sleep(60)"])
    os._exit(0)
time.sleep(60)
"""


def alive(marker: str) -> list[str]:
    numbers = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(marker.encode()):
                numbers.append(folder.name)
        except OSError:
            continue
    return numbers


async def test_cancelling_kills_every_descendant_and_leaves_no_zombie(sandbox: Sandbox) -> None:
    await warmed(sandbox)
    kept = await settled()
    run = asyncio.create_task(sandbox.run(DAEMON))
    while not alive(CANARY):
        assert not run.done()
        await asyncio.sleep(0.05)
    assert len(alive(CANARY)) == 1
    before = descriptors()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not alive(CANARY)
    await only(kept)
    assert descriptors() < before


OWNER = f"""
import asyncio, sys
from afm.sandbox import open_sandbox
asyncio.run(open_sandbox(sys.argv[1], max_parallel=1, limits={{"wall_s": 60}}).run({DAEMON!r}))
"""


@pytest.mark.slow
def test_everything_dies_with_an_owner_killed_by_kill_9(backend: str, tmp_path: Path) -> None:
    """And nothing of a run is a file of the host."""
    command, environment = [sys.executable, "-c", OWNER, backend], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment) as owner:
        try:
            while not alive(CANARY):
                assert owner.poll() is None
                time.sleep(0.05)
            family = descendants(owner.pid)
        finally:
            owner.kill()
    assert list(tmp_path.iterdir()) == []
    assert len(family) >= 4
    deadline = time.monotonic() + 10
    while (left := [pid for pid in family if Path("/proc", pid).exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


@pytest.mark.slow
async def test_cancelling_at_any_moment_leaves_nothing(sandbox: Sandbox) -> None:
    await warmed(sandbox)
    before, kept = descriptors(), await settled()
    for delay_s in (0.0, 0.003, 0.01, 0.04):
        runs = [asyncio.create_task(sandbox.run("import time; time.sleep(30)")) for _ in range(4)]
        await asyncio.sleep(delay_s)
        for run in runs:
            run.cancel()
        results = await asyncio.gather(*runs, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await only(kept)
        assert descriptors() <= before
    ended_well = await asyncio.gather(*(sandbox.run(f"print({n})", str(n)) for n in range(12)))
    assert [result.stdout for result in ended_well] == [f"{n}\n" for n in range(12)]
    await only(kept)
    assert descriptors() <= before


def processes() -> set[str]:
    return set(descendants())


async def settled() -> set[str]:
    """The processes once two looks agree: while one ends, the kernel may skip another in its list."""
    seen = processes()
    while (again := processes()) != seen:
        seen = again
        await asyncio.sleep(0.02)
    return seen


async def only(kept: set[str]) -> None:
    """Wait until no processes are left but those of ``kept``: a dead one stays in the kernel's list for a moment."""
    for _ in range(500):
        if processes() <= kept:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"left: {processes() - kept}")


async def begun(before: set[str]) -> None:
    """Waits until a program runs beside the processes of ``before``."""
    for _ in range(1000):
        if processes() - before:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("no program was started in 20 s")


async def warmed(sandbox: Sandbox) -> Sandbox:
    """The sandbox after as many parallel runs as it allows: what it keeps is there."""
    await asyncio.gather(
        *(sandbox.run("import time; time.sleep(0.1)") for _ in range(2 * (os.cpu_count() or 1)))
    )
    return sandbox


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_ending_the_event_loop_kills_what_still_runs(backend: str) -> None:
    box = open_sandbox(backend)
    kept: set[str] = set()

    async def leave_running() -> None:
        await warmed(box)
        kept.update(await settled())
        runs = [asyncio.create_task(box.run("import time; time.sleep(60)")) for _ in range(4)]
        await asyncio.sleep(0.02)
        assert not any(run.done() for run in runs)

    at_first, before = processes(), descriptors()
    asyncio.run(leave_running())
    asyncio.run(only(kept))
    assert asyncio.run(box.run("print(7)")).stdout == "7\n"
    asyncio.run(box.close())
    asyncio.run(only(at_first))
    assert descriptors() <= before


async def test_cancelling_twice_still_cleans_up(sandbox: Sandbox) -> None:
    await warmed(sandbox)
    before, kept = descriptors(), await settled()
    run = asyncio.create_task(sandbox.run("import time; time.sleep(60)"))
    await asyncio.sleep(0)
    run.cancel()
    await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await only(kept)
    for _ in range(500):
        if descriptors() <= before:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"left: {descriptors() - before} descriptors")


async def test_closing_starts_nothing_that_waited(backend: str) -> None:
    kept = processes()
    sandbox = open_sandbox(backend, max_parallel=1)
    await sandbox.run("1")
    opened = await settled()
    runs = [asyncio.create_task(sandbox.run("import time; time.sleep(60)")) for _ in range(4)]
    await begun(opened)
    await sandbox.close()
    await only(kept)
    first, *waited = await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 20)
    assert isinstance(first, RunResult)
    assert first.reason is ExitReason.KILLED
    assert all(isinstance(end, SandboxError) and "was closed" in str(end) for end in waited)
    await only(kept)
    assert (await sandbox.run("print('open again')")).stdout == "open again\n"
    await sandbox.close()


@pytest.mark.slow
async def test_closing_while_it_opens_leaves_nothing(backend: str) -> None:
    kept = processes()
    sandbox = open_sandbox(backend, max_parallel=1)
    for moment_s in (0.0, 0.05, 0.3):
        run = asyncio.create_task(sandbox.run("import time; time.sleep(0.2)"))
        await asyncio.sleep(moment_s)
        await sandbox.close()
        (end,) = await asyncio.gather(run, return_exceptions=True)
        assert isinstance(end, RunResult | SandboxError)
        assert not isinstance(end, SandboxUnavailableError), end
        await only(kept)


def test_a_fork_of_the_owner_has_a_sandbox_of_its_own(backend: str) -> None:
    sandbox = open_sandbox(backend, max_parallel=1)
    assert asyncio.run(sandbox.run("print(1)")).stdout == "1\n"

    async def both() -> list[str]:
        results = await asyncio.gather(*(sandbox.run(f"print({n})") for n in (2, 3)))
        await sandbox.close()
        return [result.stdout for result in results]

    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            status = 0 if asyncio.run(asyncio.wait_for(both(), 60)) == ["2\n", "3\n"] else 1
        os._exit(status)
    assert ended(child, 90) == 0
    assert asyncio.run(sandbox.run("print(4)")).stdout == "4\n"
    asyncio.run(sandbox.close())


async def test_the_event_loop_is_never_held_up(sandbox: Sandbox) -> None:
    await sandbox.run("1")
    run, turns = asyncio.create_task(sandbox.run("import time; time.sleep(0.7)")), 0
    while not run.done():
        turns += 1
        await asyncio.sleep(0.005)
    assert turns > 14  # 140 on an idle machine; a few if the loop waits for the program


NO_NAMESPACES = """case "$1" in --help) exec REAL --help;; esac
echo 'bwrap: No permissions to create a new namespace' >&2; exit 1"""
"""A bubblewrap that fails as it does on a kernel that forbids user namespaces."""


@pytest.mark.parametrize("kind", ["auto", "zygote", "bubblewrap"])
@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ("bubblewrap", "apt-get install bubblewrap"),
        ("namespaces", "No permissions.*unprivileged_userns_clone"),
        ("python", "'/nonexistent/python' does not exist.*apt-get install python3"),
    ],
)
async def test_nothing_runs_without(
    lacks: str, message: str, kind: str, stand_in: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "bubblewrap":
        monkeypatch.setenv("PATH", "/nonexistent")
    elif lacks == "namespaces":
        stand_in("bwrap", NO_NAMESPACES)
    options = {"python": "/nonexistent/python"} if lacks == "python" else {}
    with pytest.raises(SandboxUnavailableError, match=message):
        await open_sandbox(kind, **options).run("print(1)")


SPIN = "while True: pass"
CROWD = "import os\nfor _ in range(12):\n    if not os.fork():\n        break\nwhile True: pass"


STARVED = (
    SPIN,
    f"import os\nif os.fork():\n    os.wait()\n{SPIN}",
    f"import threading\nthreading.Thread(target=exec, args=({SPIN!r},)).start()",
)
IDLE = (
    "import time\ntime.sleep(60)",
    f"import time\ntime.sleep(2)\n{SPIN}",
    "import os\nos.read(os.pipe()[0], 1)",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    f"import os\nos.nice(19)\n{SPIN}",
    f"import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n{SPIN}",
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zygote"], indirect=True)
async def test_a_program_that_the_machine_starves_is_told_from_an_idle_one(backend: str) -> None:
    limits, programs = SandboxLimits(wall_s=3.0, cpu_s=5), (*STARVED, *IDLE)
    with pinned():
        sandbox = open_sandbox(backend, limits=limits, max_parallel=len(programs))
        await asyncio.gather(*(sandbox.run("pass") for _ in programs))
    try:
        with busy_core():
            results = await asyncio.gather(*map(sandbox.run, programs))
    finally:
        await sandbox.close()
    assert [result.starved(limits.wall_s) for result in results] == [True] * 3 + [False] * 6, results
    assert {result.reason for result in results[:4]} == {ExitReason.TIMEOUT}


@pytest.mark.slow
async def test_processes_of_a_program_do_not_starve_each_other(backend: str) -> None:
    """Twelve on one core wait eleven twelfths of the time; together they have the core."""
    with pinned():
        sandbox = open_sandbox(backend, limits=SandboxLimits(wall_s=2.0, cpu_s=5))
        await sandbox.run("pass")
    try:
        result = await sandbox.run(CROWD)
    finally:
        await sandbox.close()
    assert result.starved_s + result.cpu_s < result.wall_s + 0.5


HOG = """import os, time
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
print("on", flush=True)
while True:
    end = time.monotonic() + 0.8
    while time.monotonic() < end: pass
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zygote"], indirect=True)
@pytest.mark.parametrize("wall_s", [4.0, 1.5], ids=["ended_waits", "a_wait_at_the_end"])
async def test_waits_longer_than_the_time_between_two_samples_are_starvation(
    backend: str, wall_s: float
) -> None:
    limits = SandboxLimits(wall_s=wall_s, cpu_s=8)
    with pinned():
        sandbox = open_sandbox(backend, limits=limits)
        await sandbox.run("pass")
        hog = await asyncio.create_subprocess_exec(sys.executable, "-c", HOG, stdout=-1, stderr=-1)
    try:
        assert hog.stdout is not None
        if not await hog.stdout.readline():
            pytest.skip("this user may not have a real-time priority")
        result = await sandbox.run(SPIN)
    finally:
        if hog.returncode is None:
            hog.kill()
        await hog.wait()
        await sandbox.close()
    assert result.starved(limits.wall_s), result
