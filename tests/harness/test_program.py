"""Programs of a harness as real processes: what they say, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from afm.datasets import Task
from afm.errors import ConfigError, EngineError
from afm.harness.episode import HarnessRunner
from afm.harness.program import MARK, NO_VERDICT, ProgramEnd, ProgramRun, ProgramStarter
from afm.harness.sessions import Session
from afm.harness.settings import HarnessSettings, program_finding
from afm.models.base import FinishReason, Generation, SamplingParams, ScriptedModel

WELL = """
import json, os, sys
task = json.load(sys.stdin)
print("thinking", file=sys.stderr)
print(task["question"], os.environ["OPENAI_BASE_URL"])
open(os.environ["AFM_VERDICT"], "w").write('{"score": 0.5}')
"""
ASKS = """
import json, os, urllib.request
def ask(text):
    body = json.dumps({"prompt": text}).encode()
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions", body))
"""
TASK = Task(id="q", question="12+13?", data_source="mini_math", ground_truth="25")
FORKS = """
import os, time
for leaves in (False, True):
    if os.fork() == 0:
        if leaves:
            os.setsid()
        time.sleep(60)
        os._exit(0)
print("done", flush=True)
"""


async def run(tmp_path: Path, program: str, *, timeout_s: float = 30.0, **changes: Any) -> ProgramRun:
    options: dict[str, Any] = {
        "episode": uuid4().hex,
        "folder": tmp_path,
        "env": {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "AFM_VERDICT": str(tmp_path / "verdict.json")},
        "stdin": b'{"question": "12+13?"}',
        "timeout_s": timeout_s,
        "max_output_bytes": 1 << 16,
        "verdict_file": tmp_path / "verdict.json",
    }
    starter = ProgramStarter([sys.executable, "-S", "-c", program], dict(os.environ))
    try:
        return await starter.run(**(options | changes))
    finally:
        await starter.close()


def processes(episode: str) -> list[int]:
    """The running processes of an episode's program that were executed, and not forked alone."""
    mark, marked = f"{MARK}={episode}\0".encode(), []
    for entry in os.scandir("/proc"):
        with suppress(OSError):
            if entry.name.isdigit() and mark in Path(entry.path, "environ").read_bytes():
                marked.append(int(entry.name))
    return marked


async def test_a_program_reads_its_task_and_leaves_answer_and_verdict(tmp_path: Path) -> None:
    ended = await run(tmp_path, WELL)
    assert (ended.end, ended.status, ended.left_behind) == (ProgramEnd.DONE, 0, 0)
    assert ended.stdout == "12+13? http://127.0.0.1:1/v1\n"
    assert (ended.stderr, ended.verdict, ended.failure) == ("thinking\n", '{"score": 0.5}', "")


async def test_a_program_gets_the_usual_environment_and_what_the_recipe_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_ORG_ID", "HF_TOKEN", "WANDB_API_KEY", "SEARCH_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "agent.py").write_text(
        f"{ASKS}ask('x')\n"
        "print(json.dumps({name: value for name, value in os.environ.items() if name != 'LC_CTYPE'}))\n"
    )
    settings = HarnessSettings(
        command=("python", str(tmp_path / "agent.py")), retries=0, environment=("SEARCH_KEY",)
    )
    runner = HarnessRunner(settings)
    try:
        played = await runner.play(
            TASK, [], lambda key, seed: Session(key, ScriptedModel(lambda text: "a"), None), 1
        )
        assert played.answer is not None, played.failure
        seen = json.loads(played.answer)
        assert [name for name, value in seen.items() if value == "secret"] == ["SEARCH_KEY"]
        assert (seen["PATH"], seen["OMP_NUM_THREADS"]) == (os.environ["PATH"], "1")
        own = {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"}
        assert own | {"AFM_MODEL", "AFM_TASK", "AFM_VERDICT", "AFM_EPISODE"} <= seen.keys()

        monkeypatch.delenv("SEARCH_KEY")
        assert "harness.environment: environment variables of harness are not set: SEARCH_KEY" in str(
            program_finding(settings)
        )
        with pytest.raises(ConfigError, match="not set: SEARCH_KEY"):
            await runner.play(
                TASK, [], lambda key, seed: Session(key, ScriptedModel(lambda text: "a"), None), 1
            )
    finally:
        await runner.close()


class _Aborting(ScriptedModel):
    """Breaks its first generation off, as an engine that is put to sleep does."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        generation = await super().generate(prompt_ids, params)
        first = len(self.params) == 1
        return replace(generation, finish=FinishReason.ABORTED) if first else generation


@pytest.mark.parametrize("retries", [0, 1])
async def test_an_episode_with_a_generation_that_broke_off_is_tried_again(
    tmp_path: Path, retries: int
) -> None:
    (tmp_path / "agent.py").write_text(ASKS + "ask('x')\nprint(25)\n")
    runner = HarnessRunner(
        HarnessSettings(command=("python", "-S", str(tmp_path / "agent.py")), retries=retries)
    )
    model = _Aborting(lambda text: "a")
    try:
        played = await runner.play(TASK, [], lambda key, seed: Session(key, model, None, seed=seed), 1)
    finally:
        await runner.close()
    assert played.failure == ("" if retries else "the engine aborted a generation")
    assert dict(played.ends) == {"done": 1 + retries}
    assert len({params.seed for params in model.params}) == 1 + retries


class _Failing(ScriptedModel):
    """Fails at first, as an engine that starts again does."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        generation = await super().generate(prompt_ids, params)
        if len(self.params) == 1:
            raise EngineError("gone")
        return generation


@pytest.mark.parametrize("asks", [1, 2])
async def test_an_engine_that_failed_is_to_blame_unless_the_program_got_its_answer(
    tmp_path: Path, asks: int
) -> None:
    """A program that goes on without its answer has no result of its own."""
    swallow = "try:\n    ask('x')\nexcept OSError:\n    pass\n"
    (tmp_path / "agent.py").write_text(ASKS + swallow * asks + "print(25)\n")
    runner = HarnessRunner(HarnessSettings(command=("python", "-S", str(tmp_path / "agent.py"))))
    model = _Failing(lambda text: "a")
    playing = runner.play(TASK, [], lambda key, seed: Session(key, model, None, seed=seed), 1)
    try:
        if asks == 1:
            with pytest.raises(EngineError, match="gone"):
                await playing
            return
        played = await playing
    finally:
        await runner.close()
    assert (played.failure, played.answer, played.turns) == ("", "25", [1])
    first, second = [params.seed for params in model.params]
    assert first == second


async def test_a_program_may_be_cut_off_by_a_closed_pipe(tmp_path: Path) -> None:
    starter = ProgramStarter(["sh", "-c", "cat /proc/self/status; yes | head -1"], dict(os.environ))
    try:
        ended = await starter.run(
            episode="e", folder=tmp_path, env=dict(os.environ), stdin=b"", timeout_s=30,
            max_output_bytes=1 << 16, verdict_file=tmp_path / "v",
        )  # fmt: skip
    finally:
        await starter.close()
    ignored = int(re.search(r"SigIgn:\s*(\w+)", ended.stdout)[1], 16)
    assert ignored & (1 << (signal.SIGPIPE - 1)) == 0
    assert ended.stdout.endswith("\ny\n")


async def test_a_crash_and_a_flood_are_no_episodes(tmp_path: Path) -> None:
    crashed = await run(tmp_path, "raise SystemExit('no such model')")
    assert (crashed.end, crashed.status) == (ProgramEnd.CRASHED, 1)
    assert crashed.failure == "the program ended with status 1: no such model"
    flooding = await run(tmp_path, "while True: print('x' * 9999)")
    assert (flooding.end, flooding.status) == (ProgramEnd.OUTPUT, None)
    with pytest.raises(ConfigError, match=r"harness.command: '/no/such' cannot be started"):
        await ProgramStarter(["/no/such"], {}).run(
            episode="e", folder=tmp_path, env={}, stdin=b"", timeout_s=1,
            max_output_bytes=1, verdict_file=tmp_path / "v",
        )  # fmt: skip


async def test_a_hung_program_ends_at_its_time_with_all_that_it_started(tmp_path: Path) -> None:
    episode, begun = uuid4().hex, time.monotonic()
    ended = await run(tmp_path, FORKS + "time.sleep(60)", timeout_s=1.0, episode=episode)
    assert ended.end is ProgramEnd.TIMEOUT
    assert time.monotonic() - begun < 20
    assert processes(episode) == []


async def test_what_a_program_leaves_behind_is_counted_and_killed(tmp_path: Path) -> None:
    episode = uuid4().hex
    ended = await run(tmp_path, FORKS, episode=episode)
    assert (ended.end, ended.stdout, ended.left_behind) == (ProgramEnd.DONE, "done\n", 2)
    assert processes(episode) == []


def running(word: str) -> int:
    """Number of processes with a word in their command."""
    return sum(word in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


HIDES = """
import ctypes, os, subprocess
os.mkdir("below")
subprocess.Popen(["setsid", "env", "-i", "sleep", "61.5"], cwd="/")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE
        os.chdir("/")
        os.execvpe("sleep", ["sleep", "62.5"], {})
    os._exit(0)
"""


async def test_a_process_cannot_leave_its_program(tmp_path: Path) -> None:
    """Two clear their environment and leave session and folder. One of them lost its parent, and hides."""
    ended = await run(tmp_path, HIDES)
    assert (ended.end, ended.left_behind) == (ProgramEnd.DONE, 2)
    assert running("61.5") == running("62.5") == 0


async def test_a_cancelled_episode_leaves_no_process(tmp_path: Path) -> None:
    episode = uuid4().hex
    task = asyncio.create_task(run(tmp_path, FORKS + "time.sleep(60)", episode=episode))
    while len(await asyncio.to_thread(processes, episode)) < 3:
        pass
    for _ in range(3):  # also if it is cancelled while its processes are killed
        task.cancel()
        await asyncio.sleep(0.001)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes(episode) == []


HOST = """
import asyncio, os, sys
from pathlib import Path
from afm.harness.program import ProgramStarter
program, folder = sys.argv[1:]
starter = ProgramStarter([sys.executable, "-S", "-c", program], dict(os.environ))
asyncio.run(starter.run(episode="e", folder=Path(folder), env=dict(os.environ), stdin=b"", timeout_s=60,
    max_output_bytes=99, verdict_file=Path(folder, "v")))
"""


def test_programs_end_when_their_harness_is_killed(tmp_path: Path) -> None:
    mark = uuid4().hex
    sleeper = f"import subprocess, time\nsubprocess.Popen(['setsid', 'sh', '-c', 'sleep 64; :', '{mark}'])\ntime.sleep(60)"
    host = subprocess.Popen([sys.executable, "-c", HOST, sleeper, str(tmp_path)])
    end = time.monotonic() + 60
    while running(mark) < 1 and time.monotonic() < end:
        time.sleep(0.05)
    assert running(mark) == 1
    host.kill()
    host.wait()
    while running(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert running(mark) == 0


async def test_a_verdict_is_read_from_a_plain_file_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("text of another file")
    link = f"import os; os.symlink({str(secret)!r}, os.environ['AFM_VERDICT'])"
    for program in (
        link,
        "import os; os.mkfifo(os.environ['AFM_VERDICT'])",
        "import os; os.mkdir(os.environ['AFM_VERDICT'])",
    ):
        ended = await run(tmp_path, program)
        assert (ended.verdict, ended.verdict_fault) == (None, NO_VERDICT)
        (tmp_path / "verdict.json").rename(tmp_path / uuid4().hex)
    assert (await run(tmp_path, "pass")).verdict_fault == ""


async def test_an_episode_whose_verdict_cannot_be_read_has_no_score(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ASKS + "ask('x')\nos.mkdir(os.environ['AFM_VERDICT'])\nprint(25)\n")
    runner = HarnessRunner(HarnessSettings(command=("python", "-S", str(tmp_path / "agent.py"))))
    model = ScriptedModel(lambda text: "a")
    try:
        played = await runner.play(TASK, [], lambda key, seed: Session(key, model, None, seed=seed), 1)
    finally:
        await runner.close()
    assert played.failure == NO_VERDICT


async def test_a_program_asks_as_often_as_the_recipe_allows(tmp_path: Path) -> None:
    """The third request is refused, and the program decides what becomes of it."""
    swallow = "import urllib.error\ntry:\n    ask('x')\nexcept urllib.error.HTTPError as error:\n    print(error.read().decode())\n"
    (tmp_path / "agent.py").write_text(ASKS + "ask('a')\nask('b')\n" + swallow)
    command = ("python", "-S", str(tmp_path / "agent.py"))
    runner = HarnessRunner(HarnessSettings(command=command, max_requests=2))
    model = ScriptedModel(lambda text: "a")
    try:
        played = await runner.play(TASK, [], lambda key, seed: Session(key, model, None, seed=seed), 1)
    finally:
        await runner.close()
    assert played.turns == [1, 1]
    assert "has had 2 requests" in str(played.answer)


@pytest.fixture
async def scripts(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[ProgramRun]]]:
    """Runs texts as scripts, each in a fork of one process."""
    script = tmp_path / "agent.py"
    starter = ProgramStarter([sys.executable, str(script), "word"], dict(os.environ), preload=True)
    (tmp_path / "work").mkdir()

    async def play(text: str, timeout_s: float = 30.0) -> ProgramRun:
        script.write_text(text)
        return await starter.run(
            episode=uuid4().hex,
            folder=tmp_path / "work",
            env={"PATH": os.environ["PATH"], "OWN": "1"},
            stdin=b"task",
            timeout_s=timeout_s,
            max_output_bytes=1 << 16,
            verdict_file=tmp_path / "verdict.json",
        )

    yield play
    await starter.close()


SAYS = """
import atexit, os, random, sys
atexit.register(print, "ended")
loaded = "colorsys" in sys.modules
import colorsys
print(__name__, sys.argv[1:], sys.stdin.read(), sorted(os.environ), os.getcwd(), loaded, random.random(), sep="|")
"""


async def test_a_forked_script_runs_as_python_runs_it(scripts: Any, tmp_path: Path) -> None:
    """The second one finds the module that the first one imported."""
    runs = [(await scripts(SAYS)).stdout.splitlines() for _ in range(2)]
    lines = [line.rpartition("|")[0] for line, _ in runs]
    own = f"__main__|['word']|task|['AFM_EPISODE', 'OWN', 'PATH']|{tmp_path}/work|"
    assert lines == [f"{own}False", f"{own}True"]
    assert [end for _, end in runs] == ["ended", "ended"]
    assert len({line for line, _ in runs}) == 2  # random numbers differ


async def test_modules_of_the_scripts_folder_are_never_kept(scripts: Any, tmp_path: Path) -> None:
    """The second one has the name of a module of Python, which comes later in the path."""
    for value in ("7 8\n", "9 10\n"):
        for name, number in zip(("helper", "colorsys"), value.split(), strict=True):
            (tmp_path / f"{name}.py").write_text(f"VALUE = {number}")
        assert (await scripts("import helper, colorsys; print(helper.VALUE, colorsys.VALUE)")).stdout == value


async def test_a_package_that_starts_a_thread_is_named(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "packages").mkdir()
    starts = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='poller', daemon=True).start()"
    (tmp_path / "packages/threaded.py").write_text(starts)
    (tmp_path / "agent.py").write_text("import threaded; print(1)")
    environment = dict(os.environ) | {"PYTHONPATH": str(tmp_path / "packages")}
    starter = ProgramStarter([sys.executable, str(tmp_path / "agent.py")], environment, preload=True)
    for _ in range(2):
        await starter.run(
            episode="e", folder=tmp_path, env=environment, stdin=b"", timeout_s=30,
            max_output_bytes=99, verdict_file=tmp_path / "v",
        )  # fmt: skip
    await starter.close()
    assert "set preload: false: poller" in capfd.readouterr().err


KEEPS = """
import atexit, pickle
class Kept:
    later: "Unknown" = None
def f(x: NoSuchName): pass
"""


async def test_the_main_module_of_a_forked_script_stays_until_it_ends(scripts: Any) -> None:
    kept = (
        KEEPS.replace("def f(x: NoSuchName): pass", "")
        + "atexit.register(lambda: print(len(pickle.dumps(Kept())) > 0))"
    )
    assert (await scripts(kept)).stdout == "True\n"
    assert (
        "NameError" in (await scripts(KEEPS)).failure
    )  # annotations are evaluated, as the script asks for nothing else


async def test_a_forked_script_fails_hangs_and_leaves_processes_as_others_do(scripts: Any) -> None:
    crashed = await scripts("import sys\nprint('so far')\nsys.exit('no such model')")
    assert (crashed.end, crashed.status, crashed.stdout) == (ProgramEnd.CRASHED, 1, "so far\n")
    assert crashed.failure == "the program ended with status 1: no such model"
    assert (await scripts("1 / 0")).failure.endswith("ZeroDivisionError: division by zero")
    assert (await scripts("import os; os.kill(os.getpid(), 9)")).status == -9
    assert (await scripts("while True: print('x' * 9999)")).end is ProgramEnd.OUTPUT
    assert (await scripts("import time; time.sleep(60)", timeout_s=0.5)).end is ProgramEnd.TIMEOUT
    left = await scripts(FORKS)
    assert (left.end, left.stdout, left.left_behind) == (ProgramEnd.DONE, "done\n", 2)


async def test_a_program_that_kills_what_watches_it_has_no_result(scripts: Any) -> None:
    """Its processes end before the next program starts."""
    mark = f"agent-{uuid4().hex}"
    sleeps = f"import os\nos.kill(os.getppid(), 9)\nos.execvp('python3', ['python3', '-c', 'while True: pass', '{mark}'])"
    lost = await scripts(sleeps)
    assert (lost.end, lost.failure) == (ProgramEnd.CRASHED, "the process that started the program ended")
    assert running(mark) == 1
    assert (await scripts("print(1)")).stdout == "1\n"
    assert running(mark) == 0


async def test_a_starter_that_was_killed_is_started_again(scripts: Any) -> None:
    kills = "import os\nos.kill(int(open(f'/proc/{os.getppid()}/stat').read().split()[3]), 9)\nprint(0)"
    assert [(await scripts(text)).stdout for text in (kills, "print(1)")] == ["0\n", "1\n"]


@pytest.mark.parametrize(
    "changes",
    [{"command": ["node", "agent.js"]}, {"command": ["python", "-S", "agent.py"]}, {"sandbox": True}],
)
def test_a_fork_needs_a_script_of_python(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"preload: needs a command like \[python, agent.py\]"):
        HarnessSettings(**({"command": ["python", "agent.py"], "preload": True} | changes))
