import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from afm.distill.filters.registry import FilterPlan
from afm.distill.filters.worker_pool import Chunk, FilePosition, decided
from afm.errors import EngineError
from afm.trajectory.io import line_of_record

PLAN = FilterPlan.model_validate(
    {"stages": [{"complexity": {}}, {"format": {}}, {"quality": {}}, {"near_duplicates": {}}]}
)


def chunk(row, number):
    """Of every three rows one is kept, one wrong, one simple; one line is no record."""
    rows = [
        row(f"{number}-0", data_source="hotpotqa", ground_truth=["x"], answer="x"),
        row(f"{number}-1", data_source="hotpotqa", ground_truth=["x"], answer="y"),
        row(f"{number}-2", queries=("one",)),
    ]
    lines = (*map(line_of_record, rows), b"{}\n")
    return Chunk(Path("rows.jsonl"), lines, (1, 2, 3, 4), FilePosition())


def helpers():
    """The processes beside this one that are ready to decide: one thread of each watches this process."""
    found = []
    for child in multiprocessing.active_children():
        tasks = Path(f"/proc/{child.pid}/task")
        if tasks.exists() and len(list(tasks.iterdir())) > 1:
            found.append(child)
    return found


def waited_for_helpers():
    until = time.monotonic() + 120
    while not helpers():
        assert time.monotonic() < until, "no other process was started"
        time.sleep(0.01)


@pytest.mark.slow
def test_many_processes_decide_as_one_does_and_in_the_same_order(wiki, row):
    chunks = [chunk(row, number) for number in range(60)]

    def slowly():
        yield from chunks[:6]
        waited_for_helpers()
        yield from chunks[6:]

    alone = list(decided(chunks, PLAN, wiki, 1))
    together = list(decided(slowly(), PLAN, wiki, 3))

    assert [found for found, _ in alone] == [found for found, _ in together] == chunks
    assert [decisions for _, decisions in alone] == [decisions for _, decisions in together]
    first = alone[0][1]
    assert [decision.kept for decision in first] == [True, False, False, False]
    assert [bool(decision.error) for decision in first] == [False, False, False, True]


def test_a_process_that_died_is_named(wiki, row):
    one = chunk(row, 0)

    def until_killed():
        for number in itertools.count():
            if number == 10:
                waited_for_helpers()
                for child in helpers():
                    os.kill(child.pid, signal.SIGKILL)
            yield one

    with pytest.raises(EngineError, match=r"a filter process died .*run the command again to resume"):
        for _ in decided(until_killed(), PLAN, wiki, 2):
            pass


def test_little_work_starts_no_other_process(wiki, row):
    found = list(decided([chunk(row, number) for number in range(4)], PLAN, wiki, 8))

    assert len(found) == 4
    assert multiprocessing.active_children() == []
