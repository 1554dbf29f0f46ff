"""Programs of a harness as real processes: what they say, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from afm.datasets import Task
from afm.errors import ConfigError, EngineError
from afm.harness.episode import HarnessRunner
from afm.harness.program import NO_VERDICT, ProgramEnd, ProgramRun, _processes, run_program
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
    return await run_program([sys.executable, "-S", "-c", program], **(options | changes))


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


async def test_a_crash_and_a_flood_are_no_episodes(tmp_path: Path) -> None:
    crashed = await run(tmp_path, "raise SystemExit('no such model')")
    assert (crashed.end, crashed.status) == (ProgramEnd.CRASHED, 1)
    assert crashed.failure == "the program ended with status 1: no such model"
    flooding = await run(tmp_path, "while True: print('x' * 9999)")
    assert (flooding.end, flooding.status) == (ProgramEnd.OUTPUT, None)
    with pytest.raises(ConfigError, match=r"harness.command: '/no/such' cannot be started"):
        await run_program(
            ["/no/such"], episode="e", folder=tmp_path / "gone", env={}, stdin=b"", timeout_s=1,
            max_output_bytes=1, verdict_file=tmp_path / "v",
        )  # fmt: skip


async def test_a_hung_program_ends_at_its_time_with_all_that_it_started(tmp_path: Path) -> None:
    episode, begun = uuid4().hex, time.monotonic()
    ended = await run(tmp_path, FORKS + "time.sleep(60)", timeout_s=1.0, episode=episode)
    assert ended.end is ProgramEnd.TIMEOUT
    assert time.monotonic() - begun < 20
    assert _processes(episode, tmp_path) == []


async def test_what_a_program_leaves_behind_is_counted_and_killed(tmp_path: Path) -> None:
    episode = uuid4().hex
    ended = await run(tmp_path, FORKS, episode=episode)
    assert (ended.end, ended.stdout, ended.left_behind) == (ProgramEnd.DONE, "done\n", 2)
    assert _processes(episode, tmp_path) == []


async def test_a_process_without_the_mark_is_known_by_its_working_folder(tmp_path: Path) -> None:
    """It left the session and has an empty environment."""
    (tmp_path / "below").mkdir()
    program = "import subprocess; subprocess.Popen(['setsid', 'env', '-i', 'sleep', '60'], cwd='below')"
    ended = await run(tmp_path, program)
    assert (ended.end, ended.left_behind) == (ProgramEnd.DONE, 1)
    assert _processes("", tmp_path) == []


async def test_a_cancelled_episode_leaves_no_process(tmp_path: Path) -> None:
    episode = uuid4().hex
    task = asyncio.create_task(run(tmp_path, FORKS + "time.sleep(60)", episode=episode))
    while len(await asyncio.to_thread(_processes, episode, tmp_path)) < 3:
        pass
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _processes(episode, tmp_path) == []


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
