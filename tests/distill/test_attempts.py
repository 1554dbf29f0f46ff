from afm.datasets import Task
from afm.distill.event_log import EventLog
from afm.distill.merge import final_attempts


def work(path, position, answer=None):
    """One attempt at a task; without an answer it fails."""
    task = Task(id=f"t{position:04d}", question="q é", ground_truth="1")
    with EventLog(path) as log:
        pen = log.begin(task, position, {})
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


def test_an_attempt_that_died_does_not_hide_the_one_before(tmp_path):
    file = tmp_path / "e"
    work(file, 0, None)
    with EventLog(file) as log:
        log.begin(Task(id="t0000", question="q", ground_truth="1"), 0, {}).say("a", "half")

    assert ends(file) == [("t0000", "too hard")]
    assert [len(events) for events in final_attempts(file)] == [3]


def test_an_attempt_that_died_first_and_was_not_tried_again_is_left_out(tmp_path):
    file = tmp_path / "e"
    with EventLog(file) as log:
        log.begin(Task(id="t0000", question="q", ground_truth="1"), 0, {}).say("a", "half")
    work(file, 1, "b")

    assert ends(file) == [("t0001", "b")]
