"""Worker processes that hang, die or write nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from process_tree import ended

from afm.errors import RewardError
from afm.rewards.workers import (
    WorkerCpuError,
    WorkerCrashError,
    WorkerKilledError,
    WorkerPool,
    WorkerTimeoutError,
)

WORKER = """
import json, os, sys, time
from afm.rewards.workers import limit_cpu
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "sleep" in request: time.sleep(request["sleep"])
    if "exit" in request: os._exit(request["exit"])
    if "kill" in request: os.kill(os.getpid(), request["kill"])
    if "cpu" in request:
        limit_cpu(request["cpu"])
        sum(range(10**12))  # C code, in which no Python handler would run
    print(json.dumps({"pid": os.getpid(), "text": request.get("text")}), flush=True)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "echo_worker.py").write_text(WORKER, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return "echo_worker"


@pytest.fixture
async def pool(module: str) -> AsyncIterator[WorkerPool]:
    made = WorkerPool(module, 2)
    yield made
    await made.close()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_requests_are_answered_by_the_same_workers(pool: WorkerPool) -> None:
    replies = await asyncio.gather(*(pool.ask({"text": f"é\n\ud800{n}"}, 20) for n in range(20)))
    assert [reply["text"] for reply in replies] == [f"é\n\ud800{n}" for n in range(20)]
    assert len({reply["pid"] for reply in replies}) <= 2


@pytest.mark.slow
async def test_a_hanging_worker_is_killed_and_replaced(pool: WorkerPool) -> None:
    pid = (await pool.ask({}, 20))["pid"]
    begun = time.monotonic()
    with pytest.raises(WorkerTimeoutError, match=r"not finished within 0\.5 s"):
        await pool.ask({"sleep": 60}, 0.5)
    assert time.monotonic() - begun < 5
    assert not is_alive(pid)
    assert (await pool.ask({}, 20))["pid"] != pid


@pytest.mark.slow
async def test_the_cause_of_death_is_known(pool: WorkerPool) -> None:
    with pytest.raises(WorkerCpuError, match="used up its CPU time"):
        await pool.ask({"cpu": 0.2}, 60)
    with pytest.raises(WorkerKilledError, match="ended from outside by signal 9"):
        await pool.ask({"kill": signal.SIGKILL}, 60)
    with pytest.raises(WorkerCrashError, match="died with status -11"):
        await pool.ask({"kill": signal.SIGSEGV}, 60)
    assert (await pool.ask({"text": "again"}, 20))["text"] == "again"


@pytest.mark.slow
async def test_a_worker_that_died_idle_is_replaced_unnoticed(pool: WorkerPool) -> None:
    pid = (await pool.ask({}, 20))["pid"]
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.3)
    assert (await pool.ask({}, 20))["pid"] != pid


async def test_a_missing_module_is_an_infrastructure_error() -> None:
    pool = WorkerPool("afm.no_such_worker", 1)
    with pytest.raises(RewardError, match=r"worker afm\.no_such_worker does not start"):
        await pool.ask({}, 20)
    await pool.close()


async def test_closing_ends_requests_under_way(pool: WorkerPool) -> None:
    pid = (await pool.ask({}, 20))["pid"]
    request = asyncio.create_task(pool.ask({"sleep": 60}, 100))
    await asyncio.sleep(0.3)
    begun = time.monotonic()
    await pool.close()
    assert time.monotonic() - begun < 5
    assert not is_alive(pid)
    with pytest.raises(RewardError):
        await request
    with pytest.raises(RewardError, match="closed"):
        await pool.ask({}, 20)


@pytest.mark.slow
def test_a_fork_in_the_middle_of_a_request_has_workers_of_its_own(module: str) -> None:
    pool = WorkerPool(module, 1)

    async def halfway() -> dict[str, object]:
        first = (await pool.ask({}, 20))["pid"]
        request = asyncio.create_task(pool.ask({"sleep": 1, "text": "x" * 200_000}, 60))
        await asyncio.sleep(0.3)
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                gc.collect()
                other = in_a_new_loop(lambda: pool.ask({"text": "fork"}, 60))
                in_a_new_loop(pool.close)
                status = 0 if other["text"] == "fork" and other["pid"] != first else 1
            os._exit(status)
        reply = await request
        assert await asyncio.to_thread(ended, child, 90.0) == 0
        assert (await pool.ask({}, 20))["pid"] == first
        await pool.close()
        assert not is_alive(first)
        return reply

    assert asyncio.run(halfway())["text"] == "x" * 200_000


def in_a_new_loop(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run in a new event loop, because the one that a fork inherits belongs to its parent."""
    asyncio._set_running_loop(None)
    return asyncio.run(work())
