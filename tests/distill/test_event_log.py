import json

import pytest
from wiki_pages import Says

from afm.datasets import Task
from afm.distill.event_log import EventKind, EventLog, final_attempts, read_events
from afm.errors import DataError


def task(name):
    return Task(id=name, question=f"{name} é?", ground_truth="1", data_source="s")


async def test_everything_a_team_does_stands_in_the_log_in_order(tmp_path):
    with EventLog(tmp_path / "e.jsonl") as log:
        pen = log.begin(task("a"), 0, {"echo": Says("HI")})
        pen.say("planner", "plan", prompt_tokens=7, completion_tokens=2, cost_usd=0.5, seconds=0.25)
        result = await pen.use("coder", "echo", "hi")
        pen.finish("writer", "done")

    begin, said, call, back, end = read_events(tmp_path / "e.jsonl")

    assert result.text == "HI"
    assert [event.id for event in (begin, said, call, back, end)] == [f"a#1.{n}" for n in range(5)]
    assert begin.meta == {"position": 0, "task": task("a").model_dump(mode="json")}
    assert [(event.kind, event.agent, event.tool, event.content) for event in (said, call, back, end)] == [
        (EventKind.MESSAGE, "planner", "", "plan"),
        (EventKind.TOOL_CALL, "coder", "echo", "hi"),
        (EventKind.TOOL_RESULT, "", "echo", "HI"),
        (EventKind.FINAL, "writer", "", "done"),
    ]
    assert (said.prompt_tokens, said.completion_tokens, said.cost_usd, said.seconds) == (7, 2, 0.5, 0.25)


def test_nothing_can_follow_the_end_of_an_attempt(tmp_path):
    with EventLog(tmp_path / "e.jsonl") as log:
        pen = log.begin(task("a"), 0, {})
        pen.finish("writer", "1")
        with pytest.raises(ValueError, match="after the attempt ended"):
            pen.say("writer", "more")


def test_a_task_is_finished_by_its_answer_not_by_its_failure(tmp_path):
    with EventLog(tmp_path / "e.jsonl") as log:
        log.begin(task("a"), 0, {}).finish("writer", "1")
        log.begin(task("b"), 1, {}).fail("no idea")
        log.begin(task("c"), 2, {}).say("planner", "still at it")
        assert log.finished == {"a"}

    with EventLog(tmp_path / "e.jsonl") as log:
        assert log.finished == {"a"}
        second = log.begin(task("b"), 1, {}).finish("writer", "2")
    assert second.id == "b#2.1"


def test_a_torn_last_line_is_dropped_on_opening_and_skipped_in_reading(tmp_path):
    file = tmp_path / "e.jsonl"
    with EventLog(file) as log:
        log.begin(task("a"), 0, {}).finish("writer", "1")
    whole = file.read_bytes()
    for torn in (b"{", b'{"id":"a#9.9"', b"x" * 200_000):
        file.write_bytes(whole + torn)
        assert len(list(read_events(file))) == 2
        with EventLog(file) as log:
            assert log.finished == {"a"}
        assert file.read_bytes() == whole


def test_a_bad_line_inside_the_log_is_named(tmp_path):
    file = tmp_path / "e.jsonl"
    file.write_text('{"id": "a#1.0", "task_id": "a", "attempt": 1, "kind": "task"}\n{"id": "x"}\n')
    with (
        pytest.raises(DataError, match=r"e\.jsonl:2: not an event: task_id: missing, but required"),
        EventLog(file),
    ):
        pass


def test_a_line_holds_no_defaults_so_that_logs_stay_small(tmp_path):
    with EventLog(tmp_path / "e.jsonl") as log:
        log.begin(task("a"), 0, {}).say("p", "hi")

    line = json.loads((tmp_path / "e.jsonl").read_text().splitlines()[1])

    assert set(line) == {"id", "task_id", "attempt", "kind", "agent", "content", "time"}


def work(path, position, answer=None):
    """One attempt at a task; without an answer it fails."""
    with EventLog(path) as log:
        pen = log.begin(task(f"t{position:04d}"), position, {})
        pen.say("a", "words")
        if answer is None:
            pen.fail("too hard")
        else:
            pen.finish("a", answer)


def ends(path):
    return [(events[0].task_id, events[-1].content) for events in final_attempts(path)]


def test_a_task_that_failed_first_keeps_its_place(tmp_path):
    file = tmp_path / "e"
    for position, answer in ((1, "b"), (0, None), (2, None), (3, "d"), (0, "a"), (2, None)):
        work(file, position, answer)

    assert ends(file) == [("t0000", "a"), ("t0001", "b"), ("t0002", "too hard"), ("t0003", "d")]


def test_an_attempt_that_died_does_not_hide_the_one_before_and_alone_is_left_out(tmp_path):
    file = tmp_path / "e"
    work(file, 0, None)
    with EventLog(file) as log:
        for position in (0, 1):
            log.begin(task(f"t{position:04d}"), position, {}).say("a", "half")
    work(file, 2, "b")

    assert ends(file) == [("t0000", "too hard"), ("t0002", "b")]
    assert [len(events) for events in final_attempts(file)] == [3, 3]
