import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from team_log import read_attempts

from afm.datasets import Task
from afm.distill.event_log import EventKind, EventLog, read_events
from afm.distill.run import collect
from afm.errors import DataError, EngineError, SandboxUnavailableError, ToolError


def tasks(count):
    return [Task(id=f"t{n:03d}", question=f"{n}?", ground_truth=str(n)) for n in range(count)]


class Adder:
    """A team that answers after a few turns of the loop, and fails where told."""

    name = "adder"

    def __init__(self, fail=(), error=None, silent=(), decline=()):
        self.fail, self.error, self.silent, self.declined = set(fail), error, set(silent), set(decline)
        self.solved = []
        self.running = self.most_running = 0

    async def solve(self, recorder):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        name = recorder.task.id
        if name in self.declined:
            recorder.decline("not for me")
        elif name in self.fail:
            if self.error:
                raise self.error
            recorder.fail("too hard")
        elif name not in self.silent:
            recorder.say("thinker", "hm")
            recorder.finish("writer", recorder.task.ground_truth)
            self.solved.append(name)


async def test_every_task_is_worked_on_once_with_the_given_parallelism(tmp_path):
    team, done = Adder(), []
    with EventLog(tmp_path / "e.jsonl") as log:
        counts = await collect(tasks(20), team, {}, log, max_parallel=5, progress=lambda *_: done.append(1))

    assert (counts.finished, counts.resumed, counts.failed) == (20, 0, 0)
    assert sorted(team.solved) == [task.id for task in tasks(20)]
    assert team.most_running == 5
    assert len(done) == 20


async def test_a_second_run_tries_failed_tasks_again_and_leaves_finished_ones(tmp_path):
    with EventLog(tmp_path / "e.jsonl") as log:
        first = await collect(tasks(6), Adder(fail={"t002"}, silent={"t004"}), {}, log)
    again = Adder()
    with EventLog(tmp_path / "e.jsonl") as log:
        second = await collect(tasks(6), again, {}, log)

    assert (first.finished, first.failed) == (4, 2)
    failures = [event.content for event in read_events(tmp_path / "e.jsonl") if event.kind is EventKind.ERROR]
    assert sorted(failures) == ["the team ended without an answer", "too hard"]
    assert (second.finished, second.resumed, second.failed) == (2, 4, 0)
    assert again.solved == ["t002", "t004"]


@pytest.mark.parametrize("error", [ToolError("down"), EngineError("gone")])
async def test_failing_infrastructure_ends_the_attempt_not_the_run(tmp_path, error):
    with EventLog(tmp_path / "e.jsonl") as log:
        counts = await collect(tasks(6), Adder(fail={"t001"}, error=error), {}, log)

    errors = [event for event in read_events(tmp_path / "e.jsonl") if event.kind is EventKind.ERROR]
    assert (counts.finished, counts.failed) == (5, 1)
    assert [event.content for event in errors] == [f"{type(error).__name__}: {error}"]


async def test_a_run_in_which_too_much_fails_stops_and_says_why(tmp_path):
    fail = {task.id for number, task in enumerate(tasks(500)) if number % 2}
    with EventLog(tmp_path / "e.jsonl") as log, pytest.raises(EngineError) as caught:
        await collect(tasks(500), Adder(fail), {}, log, max_parallel=1)

    assert str(caught.value) == "20 of 40 tasks failed, the last one with: too hard"


async def test_tasks_that_the_team_declines_do_not_stop_a_run_and_are_not_tried_again(tmp_path):
    declined = {task.id for number, task in enumerate(tasks(60)) if number % 2}
    again = Adder(decline=declined)
    with EventLog(tmp_path / "e.jsonl") as log:
        first = await collect(tasks(60), Adder(decline=declined), {}, log, max_parallel=1)
    with EventLog(tmp_path / "e.jsonl") as log:
        second = await collect(tasks(60), again, {}, log)

    assert (first.finished, first.declined, first.failed) == (30, 30, 0)
    assert (second.resumed, second.declined, again.most_running) == (60, 0, 0)


async def test_without_isolation_nothing_goes_on(tmp_path):
    team = Adder(fail={"t000"}, error=SandboxUnavailableError("install bubblewrap"))
    with EventLog(tmp_path / "e.jsonl") as log, pytest.raises(SandboxUnavailableError):
        await collect(tasks(9), team, {}, log, max_parallel=1)

    assert team.solved == []


async def test_two_tasks_with_one_id_are_refused(tmp_path):
    with EventLog(tmp_path / "e.jsonl") as log, pytest.raises(DataError, match="'t000' occurs twice"):
        await collect([*tasks(2), *tasks(1)], Adder(), {}, log)


WORKER = """
import asyncio, random, sys
from afm.datasets import Task
from afm.distill.event_log import EventLog
from afm.distill.run import collect

class Slow:
    name = "slow"
    async def solve(self, recorder):
        for number in range(4):
            recorder.say("thinker", f"step {number} " + "x" * 300)
            await asyncio.sleep(0.002 * random.random())
        recorder.finish("writer", recorder.task.id)

with EventLog(sys.argv[1]) as log:
    tasks = (Task(id=f"t{n:04d}", question="q", ground_truth="1") for n in range(1200))
    print("open", flush=True)
    asyncio.run(collect(tasks, Slow(), {}, log, max_parallel=64))
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_and_doubles_no_task(tmp_path):
    file = tmp_path / "e.jsonl"
    kills = 0
    for delay in (0.03, 0.08, None):
        worker = subprocess.Popen([sys.executable, "-c", WORKER, file], stdout=subprocess.PIPE)
        assert worker.stdout.readline() == b"open\n"
        if delay is not None:
            time.sleep(delay)
            os.kill(worker.pid, signal.SIGKILL)
        status = worker.wait()
        worker.stdout.close()
        kills += status == -signal.SIGKILL

    ends = Counter(event.task_id for event in read_events(file) if event.kind is EventKind.FINAL)
    attempts = list(read_attempts(file))

    assert kills >= 2
    assert status == 0
    assert ends == {f"t{number:04d}": 1 for number in range(1200)}
    assert [attempt[0].task_id for attempt in attempts] == sorted(ends)
    assert all(len(attempt) == 6 for attempt in attempts)
    assert max(attempt[0].attempt for attempt in attempts) > 1
