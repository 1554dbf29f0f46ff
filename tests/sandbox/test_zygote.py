"""What is particular to the zygotes: warm packages, what happens when they die, hang or lose their owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_tree import descendants

from afm.errors import SandboxError
from afm.sandbox import ExitReason, Sandbox, SandboxLimits, open_sandbox

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = open_sandbox("zygote", max_parallel=1, warm=[])
    yield made
    asyncio.run(made.close())


@pytest.fixture
async def alone(sandbox: Sandbox) -> None:
    """The zygotes of this process are those that the test starts."""
    await sandbox.close()


@pytest.fixture
def packages() -> Iterator[Path]:
    """A package that takes its time to import and a broken one, readable by everyone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "slowpoke").mkdir(parents=True)
    (folder / "slowpoke" / "__init__.py").write_text("import time\ntime.sleep(0.5)\nloaded = []\n")
    (folder / "broken.py").write_text("raise ValueError('not today')\n")
    yield folder
    shutil.rmtree(folder)


def python(code: str) -> subprocess.CompletedProcess[str]:
    """The same program under the ordinary Python."""
    command = [sys.executable, "-I", "-X", "utf8", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, input="")


def zygotes() -> list[int]:
    """Process ids of the zygotes of this process."""
    numbers = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            grandparent = int(Path("/proc", str(parent), "stat").read_text().rpartition(")")[2].split()[1])
            if (
                b"/zygote/serve.py" in command
                and not command[0].endswith(b"bwrap")
                and grandparent == os.getpid()
            ):
                numbers.append(int(folder.name))
    return numbers


async def busy_zygote() -> int:
    """Process id of a zygote, as soon as one has forked a program."""
    while True:
        for pid in zygotes():
            with contextlib.suppress(OSError):
                if len(descendants(pid)) > 1:
                    return pid
        await asyncio.sleep(0.02)


async def kill_busy_zygote() -> None:
    """Kill a zygote that has forked a program and wait until it is dead: on a busy machine it looks alive a while longer."""
    pid = await busy_zygote()
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(select.select, [pidfd], [], [])
    os.close(pidfd)


@pytest.mark.slow
async def test_a_mentioned_package_is_warm_and_any_other_can_be_imported(packages: Path) -> None:
    sandbox = open_sandbox("zygote", max_parallel=1, packages=[str(packages)], warm=[["slowpoke"]])
    code = "import sys; warm = 'slowpoke' in sys.modules\nimport slowpoke\nprint(warm, slowpoke.loaded)"
    code += "\nslowpoke.loaded.append(1)"
    results = [await sandbox.run(code) for _ in range(2)]
    unmentioned = await sandbox.run("print(__import__('slow' + 'poke').loaded)")
    await sandbox.close()
    assert [result.stdout for result in results] == ["True []\n"] * 2
    assert unmentioned.stdout == "[]\n"
    assert unmentioned.wall_s > 0.5


@pytest.mark.slow
async def test_a_package_that_cannot_be_imported_fails_in_the_program_and_is_told_once(
    packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = open_sandbox("zygote", max_parallel=2, packages=[str(packages)], warm=[["slowpoke", "broken"]])
    assert "warm: slowpoke, broken" in (await sandbox.isolation())[1]
    results = await asyncio.gather(*(sandbox.run("import broken") for _ in range(4)))
    said = (await sandbox.isolation())[1]
    await sandbox.close()
    for result in results:
        assert (result.reason, result.stderr.splitlines()[-1]) == (ExitReason.ERROR, "ValueError: not today")
    assert "not warm, because they fail: broken: ValueError: not today" in said
    warnings = [record.getMessage() for record in caplog.records if "broken" in record.getMessage()]
    assert len(warnings) == 1
    assert "broken: ValueError: not today" in warnings[0]


async def test_runs_do_not_share_random_numbers(sandbox: Sandbox) -> None:
    code = "import random, uuid, secrets\nprint(random.random(), uuid.uuid4(), secrets.token_hex(4))"
    printed = [(await sandbox.run(code)).stdout for _ in range(3)]
    words = [word for line in printed for word in line.split()]
    assert len(set(words)) == 9


async def test_the_end_of_a_program_is_that_of_python(sandbox: Sandbox) -> None:
    """Threads are waited for, then atexit, then destructors; an exception in one of them changes nothing."""
    code = """
import atexit, threading, time
class Loud:
    def __init__(self, name): self.name = name
    def __del__(self):
        print("destroyed", self.name)
        if self.name == "b": raise ValueError("in a destructor")
a = Loud("a")
b = Loud("b")
cycle = Loud("c"); cycle.own = cycle
atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("main", end="\\n")
"""
    here = python(code)
    result = await sandbox.run(code)
    assert result.stdout == here.stdout == "main\nthread\natexit\ndestroyed a\ndestroyed b\ndestroyed c\n"
    assert "ValueError: in a destructor" in result.stderr
    assert (result.reason, result.exit_status) == (ExitReason.OK, 0)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys, threading; threading.Thread(target=sys.exit, args=(5,)).start()", 0),
        ("import atexit, os; atexit.register(os._exit, 9)", 9),
        ("import sys; sys.excepthook = None; 1/0", 1),
        ("import sys; sys.stdout = None; sys.stderr = None; 1/0", 1),
        ("import sys\nclass S:\n    def flush(self): 1/0\n    closed = False\nsys.stdout = S()", 120),
        ("import sys; sys.modules.clear(); raise SystemExit(4)", 4),
    ],
)
async def test_exit_statuses_are_those_of_python(code: str, status: int, sandbox: Sandbox) -> None:
    assert (await sandbox.run(code)).exit_status == status == python(code).returncode


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import io\nsys.stdout = io.StringIO()\nsys.__stdout__.write('kept')", "kept"),
        ("file = open(1, 'w', closefd=False); file.write('14')", "14"),
        ("class A: pass\na = A(); a.me = a; a.file = open(1, 'w', closefd=False); a.file.write('14')", "14"),
        ("import math\nmath.file = open(os.dup(1), 'wb'); math.file.write(b'raw')", "raw"),
        (
            "import io\nfile = open(1, 'w', closefd=False); file.write('file ')\nold = sys.stdout\n"
            "old.write('old '); sys.stdout = io.StringIO()",
            "file old ",
        ),
        (
            "import io, math\nclass Own(io.TextIOWrapper):\n    def flush(self): os.write(1, b'once '); super().flush()\n"
            "math.file = Own(open(1, 'wb', closefd=False)); math.file.write('text')",
            "once text",
        ),
        (
            "class Odd(type):\n    __hash__ = None\n    __eq__ = None\nclass A(metaclass=Odd): pass\na = A()\n"
            "import math\nmath.file = open(1, 'w', closefd=False); math.file.write('x')",
            "x",
        ),
    ],
)
async def test_output_left_in_a_buffer_is_printed_as_by_python(
    code: str, printed: str, sandbox: Sandbox
) -> None:
    code = f"import os, sys\n{code}"
    assert (await sandbox.run(code)).stdout == printed == python(code).stdout


async def test_a_writer_that_blocks_a_thread_does_not_hold_up_the_end(sandbox: Sandbox) -> None:
    code = """
import os, threading, time
reading, writing = os.pipe()
def fill():
    with open(writing, "wb") as full:
        full.write(bytes(1 << 20))
threading.Thread(target=fill, daemon=True).start()
time.sleep(0.2); print("end")
"""
    result = await sandbox.run(code, limits=SandboxLimits(wall_s=30.0))
    assert (result.reason, result.stdout) == (ExitReason.OK, "end\n")


async def test_the_standard_streams_look_as_usual_but_show_whole_lines(sandbox: Sandbox) -> None:
    """Python would hold back what goes to a pipe; here each line goes out, so that a stopped program keeps it."""
    code = (
        "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n"
        "    print(s.name, s.mode, s.encoding, s.errors, s.fileno(), s is getattr(sys, '__' + s.name[1:-1] + '__'))"
    )
    assert (await sandbox.run(code)).stdout == python(code).stdout
    buffering = "import sys\nprint([s.line_buffering for s in (sys.stdin, sys.stdout, sys.stderr)])"
    assert (await sandbox.run(buffering)).stdout == "[False, True, True]\n"


async def test_a_recursion_may_go_as_deep_as_usual(sandbox: Sandbox) -> None:
    code = "def depth(n):\n    try: return depth(n + 1)\n    except RecursionError: return n\nprint(depth(1) >= 990)"
    assert (await sandbox.run(code)).stdout == "True\n"


@pytest.mark.parametrize(
    ("status", "reason"), [("any(ends)", ExitReason.MEMORY), ("not any(ends)", ExitReason.OK)]
)
async def test_several_processes_together_keep_the_memory_limit(
    status: str, reason: ExitReason, sandbox: Sandbox
) -> None:
    """A program whose children were killed has run out of memory, unless it ends well all the same."""
    if not any(line.startswith("memory cgroup") for line in await sandbox.isolation()):
        pytest.skip("no memory cgroup is writable")
    code = f"""
import os
held = []
gate, opener = os.pipe()
for _ in range(3):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(opener)
        block = bytearray(180 << 20); os.write(writing, b"held"); os.read(gate, 1); os._exit(0)
    os.close(writing); held.append(reading)
for reading in held: os.read(reading, 4)  # each holds its memory or is dead
os.close(opener)
ends = [os.wait()[1] for _ in held]
os._exit({status})
"""
    limits = SandboxLimits(memory_bytes=300 << 20, wall_s=60)
    assert (await sandbox.run(code, limits=limits)).reason is reason
    assert (await sandbox.run("print('next')", limits=limits)).stdout == "next\n"


@pytest.mark.usefixtures("alone")
async def test_a_zygote_that_dies_between_runs_is_replaced(sandbox: Sandbox) -> None:
    await sandbox.run("1")
    (first,) = zygotes()
    os.kill(first, signal.SIGKILL)
    assert (await sandbox.run("print('again')")).stdout == "again\n"
    assert len(zygotes()) == 1
    assert zygotes() != [first]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
async def test_a_run_whose_zygote_dies_is_repeated(sandbox: Sandbox) -> None:
    await sandbox.run("1")
    run = asyncio.create_task(sandbox.run("import time; time.sleep(1); print('done')"))
    await kill_busy_zygote()
    result = await run
    assert (result.reason, result.stdout) == (ExitReason.OK, "done\n")


@pytest.mark.usefixtures("alone")
async def test_a_program_whose_zygotes_keep_dying_is_not_blamed(sandbox: Sandbox) -> None:
    await sandbox.run("1")
    run = asyncio.create_task(sandbox.run("import time; time.sleep(30)", limits=SandboxLimits(wall_s=60)))
    for _ in range(2):
        await kill_busy_zygote()
    with pytest.raises(SandboxError, match="2 zygotes were lost"):
        await run


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
async def test_a_zygote_that_hangs_is_replaced() -> None:
    sandbox = open_sandbox("zygote", max_parallel=1, start_s=2)
    await sandbox.run("1")
    (first,) = zygotes()
    os.kill(first, signal.SIGSTOP)
    assert (await sandbox.run("print('again')")).stdout == "again\n"
    assert first not in zygotes()
    await sandbox.close()


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
async def test_cancelling_a_run_in_a_zygote_that_hangs_ends() -> None:
    sandbox = open_sandbox("zygote", max_parallel=1, start_s=2)
    await sandbox.run("1")
    os.kill(zygotes()[0], signal.SIGSTOP)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(sandbox.run("print(1)"), 0.2)
    assert (await sandbox.run("print('again')")).stdout == "again\n"
    await sandbox.close()


@pytest.mark.slow
async def test_closing_while_a_run_ends_is_no_failure() -> None:
    """The cgroup may be gone before the run has looked at it."""
    sandbox = open_sandbox("zygote", max_parallel=2, warm=[])
    for moment_s in (0.0, 0.02, 0.07):
        await sandbox.run("1")
        codes = ("os.fork(); os.fork(); time.sleep(5)", "os._exit(0)")
        runs = [asyncio.create_task(sandbox.run(f"import os, time; {code}")) for code in codes]
        await asyncio.sleep(moment_s)
        await sandbox.close()
        ends = await asyncio.gather(*runs, return_exceptions=True)
        assert not [
            end for end in ends if isinstance(end, BaseException) and not isinstance(end, SandboxError)
        ]


@pytest.mark.slow
async def test_the_time_of_a_zygotes_start_is_not_the_runs(packages: Path) -> None:
    """A run that was cancelled while its zygote warms up leaves that work to go on beside the next run."""
    (packages / "toil.py").write_text("import time\nwhile time.process_time() < 1.2: pass\n")
    sandbox = open_sandbox("zygote", max_parallel=1, packages=[str(packages)], warm=[["toil"]])
    await sandbox.run("1")
    lost = asyncio.create_task(sandbox.run("import toil"))
    await asyncio.sleep(0.2)
    lost.cancel()
    await asyncio.wait([lost])
    result = await sandbox.run("import time; time.sleep(1)", limits=SandboxLimits(cpu_s=1, wall_s=60))
    await sandbox.close()
    assert result.reason is ExitReason.OK
    assert result.cpu_s < 0.5


def test_a_loop_that_stops_in_the_middle_of_a_run_does_not_cost_a_place() -> None:
    sandbox = open_sandbox("zygote", max_parallel=1)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(sandbox.run("1"))
    lost = loop.create_task(sandbox.run("import time; time.sleep(60)"))
    loop.run_until_complete(asyncio.sleep(0.2))
    loop.close()
    assert not lost.done()
    assert asyncio.run(sandbox.run("print('free')")).stdout == "free\n"
    asyncio.run(sandbox.close())
