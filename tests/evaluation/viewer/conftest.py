"""Episodes on disk, and a server that shows them: the fixture ``viewer`` holds all of this module."""

import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from afm.trajectory.io import RecordWriter
from afm.trajectory.record import CallRecord, Cost, Record, StopReason, Verdict
from afm.trajectory.tags import Author, Segment


@pytest.fixture(scope="session")
def viewer():
    """This module: what its tests share."""
    return sys.modules[__name__]


def episode(number, *, passed=True, source="nq", question=None, tool="wiki_search", **more):
    """An episode of the mhqa agent with one call."""
    query, seen = f"river {number}", f"\n<observation>\nThe river {number} is long.\n</observation>\n"
    before = (
        f"<think>Look it up.</think><plan>Search.</plan><think>Now.</think><wiki_search>{query}</wiki_search>"
    )
    after = f"<think>Found.</think><answer>{number}</answer>"
    call = CallRecord(role="wiki_search", tool=tool, argument=query, observation=seen, ok=True, seconds=0.25)
    segments = ((Author.AGENT, before), (Author.ENVIRONMENT, seen), (Author.AGENT, after))
    fields = {
        "id": f"e{number}",
        "agent": "mhqa",
        "agent_digest": "",
        "question": question or f"How long is river {number}?",
        "segments": tuple(Segment(Author(author), text) for author, text in segments),
        "ground_truth": str(number),
        "data_source": source,
        "stop": StopReason.ANSWER,
        "verdict": Verdict(score=float(passed), evidence="by hand"),
        "cost": Cost(agent_tokens=10 + number, tool_calls=1, wall_seconds=number / 2),
        "calls": (call,),
    }
    return Record(**fields | more)


def write(path, episodes):
    with RecordWriter(path) as writer:
        for one in episodes:
            writer.write(one)


def line_without_numbers(number):
    """An episode whose time is infinite and whose score is NaN: Python's json writes them, no browser reads them."""
    line = (
        episode(number).model_dump_json().replace(f'"wall_seconds":{number / 2}', '"wall_seconds":Infinity')
    )
    return line.replace('"score":1.0', '"score":NaN') + "\n"


@contextmanager
def showing(index, files=1):
    """The real server on a free port; yields its address once that many files are indexed."""
    pytest.importorskip("uvicorn")
    from loopback import LoopbackServer

    from afm.evaluation.viewer.run_files import RunFiles
    from afm.evaluation.viewer.server import Follower, make_app

    follower = Follower(index, every_s=0.2)
    server = LoopbackServer(make_app(index, follower, RunFiles(index.path)), log_level="error").start()
    follower.start()
    try:
        until(lambda: answered(server.origin, files))
        yield server.origin
    finally:
        follower.stop()
        server.stop()


def answered(address, files=1):
    try:
        found = httpx.get(f"{address}/api/status").json()
    except httpx.TransportError:
        return False
    return found["files"] >= files and found["bytes_done"] == found["bytes_total"]


def until(holds, *, seconds=60):
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)
