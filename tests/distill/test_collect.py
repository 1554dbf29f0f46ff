import asyncio

import pytest

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


async def collected(folder, team, count=6, **options):
    with EventLog(folder / "e.jsonl") as log:
        return await collect(tasks(count), team, {}, log, **options)


def errors(folder):
    return [event.content for event in read_events(folder / "e.jsonl") if event.kind is EventKind.ERROR]


async def test_every_task_is_worked_on_once_with_the_given_parallelism(tmp_path):
    team, done = Adder(), []
    counts = await collected(tmp_path, team, 20, max_parallel=5, progress=lambda *_: done.append(1))

    assert (counts.finished, counts.resumed, counts.failed) == (20, 0, 0)
    assert sorted(team.solved) == [task.id for task in tasks(20)]
    assert (team.most_running, len(done)) == (5, 20)


async def test_a_second_run_tries_failed_tasks_again_and_leaves_finished_ones(tmp_path):
    first = await collected(tmp_path, Adder(fail={"t002"}, silent={"t004"}))
    again = Adder()
    second = await collected(tmp_path, again)

    assert (first.finished, first.failed) == (4, 2)
    assert sorted(errors(tmp_path)) == ["the team ended without an answer", "too hard"]
    assert (second.finished, second.resumed, second.failed) == (2, 4, 0)
    assert again.solved == ["t002", "t004"]


@pytest.mark.parametrize("error", [ToolError("down"), EngineError("gone")])
async def test_failing_infrastructure_ends_the_attempt_not_the_run(tmp_path, error):
    counts = await collected(tmp_path, Adder(fail={"t001"}, error=error))

    assert (counts.finished, counts.failed) == (5, 1)
    assert errors(tmp_path) == [f"{type(error).__name__}: {error}"]


async def test_a_run_in_which_too_much_fails_stops_and_says_why(tmp_path):
    team = Adder(fail=[task.id for task in tasks(500)[1::2]])
    with pytest.raises(EngineError, match=r"^20 of 40 tasks failed, the last one with: too hard$"):
        await collected(tmp_path, team, 500, max_parallel=1)


async def test_tasks_that_the_team_declines_do_not_stop_a_run_and_are_not_tried_again(tmp_path):
    declined = [task.id for task in tasks(60)[1::2]]
    again = Adder(decline=declined)
    first = await collected(tmp_path, Adder(decline=declined), 60, max_parallel=1)
    second = await collected(tmp_path, again, 60)

    assert (first.finished, first.declined, first.failed) == (30, 30, 0)
    assert (second.resumed, second.declined, again.most_running) == (60, 0, 0)


async def test_without_isolation_nothing_goes_on(tmp_path):
    team = Adder(fail={"t000"}, error=SandboxUnavailableError("install bubblewrap"))
    with pytest.raises(SandboxUnavailableError):
        await collected(tmp_path, team, max_parallel=1)
    assert team.solved == []


async def test_two_tasks_with_one_id_are_refused(tmp_path):
    with EventLog(tmp_path / "e.jsonl") as log, pytest.raises(DataError, match="'t000' occurs twice"):
        await collect([*tasks(2), *tasks(1)], Adder(), {}, log)
