"""The queue in front of the places."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from afm.errors import SandboxBusyError
from afm.sandbox import SandboxLimits, open_sandbox
from afm.sandbox.slots import Cores, Slots


async def test_first_come_first_served() -> None:
    slots = Slots(["place"], 10)
    held = await slots.acquire()
    order: list[int] = []

    async def caller(number: int) -> None:
        place = await slots.acquire()
        order.append(number)
        await asyncio.sleep(0)
        slots.release(place)

    callers = [asyncio.create_task(caller(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert slots.waiting == 5
    slots.release(held)
    await asyncio.gather(*callers)
    assert order == [0, 1, 2, 3, 4]


async def test_a_full_queue_says_so() -> None:
    slots = Slots(["place"], 1)
    await slots.acquire()
    waiting = asyncio.create_task(slots.acquire())
    await asyncio.sleep(0)
    with pytest.raises(SandboxBusyError, match="1 runs are waiting, expected at most 1"):
        await slots.acquire()
    slots.release("place")
    assert await waiting == "place"


@pytest.mark.parametrize("released_first", [True, False])
async def test_a_cancelled_caller_loses_no_place(released_first: bool) -> None:
    slots = Slots(["place"], 10)
    held = await slots.acquire()
    waiting = asyncio.create_task(slots.acquire())
    await asyncio.sleep(0)
    if released_first:
        slots.release(held)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    if not released_first:
        slots.release(held)
    assert await asyncio.wait_for(slots.acquire(), 20) == "place"


def test_several_event_loops_share_the_places() -> None:
    slots = Slots(["a", "b"], 1000)
    most, inside, lock = 0, 0, threading.Lock()

    async def caller() -> None:
        nonlocal most, inside
        place = await slots.acquire()
        with lock:
            inside += 1
            most = max(most, inside)
        await asyncio.sleep(0.001)
        with lock:
            inside -= 1
        slots.release(place)

    async def many() -> None:
        await asyncio.gather(*(caller() for _ in range(50)))

    threads = [threading.Thread(target=asyncio.run, args=(many(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert most == 2


def test_a_caller_whose_loop_was_closed_is_passed_over() -> None:
    slots = Slots(["place"], 10)
    held = asyncio.run(slots.acquire())
    loop = asyncio.new_event_loop()
    lost = loop.create_task(slots.acquire())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    slots.release(held)
    assert asyncio.run(asyncio.wait_for(slots.acquire(), 20)) == "place"
    assert not lost.done()


async def test_a_cancelled_run_gives_its_core_back() -> None:
    cores = Cores(1)

    async def run() -> None:
        async with cores.hold():
            await asyncio.sleep(60)

    running, waiting = asyncio.create_task(run()), asyncio.create_task(run())
    await asyncio.sleep(0)
    for task in (waiting, running):
        task.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    async with asyncio.timeout(20), cores.hold():
        pass


def test_a_core_whose_loop_was_closed_is_given_out_once() -> None:
    cores = Cores(1)

    async def run() -> None:
        async with cores.hold():
            await asyncio.sleep(60)

    loop = asyncio.new_event_loop()
    lost = loop.create_task(run())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

    async def two() -> None:
        async with asyncio.timeout(20), cores.hold():
            lost.get_coro().close()  # type: ignore[union-attr] # its `finally` runs only now
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1), cores.hold():
                    pass

    asyncio.run(two())


@pytest.mark.slow
@pytest.mark.sandbox
async def test_sandboxes_of_a_process_share_its_cores() -> None:
    """Each program says when it was there, by the clock that all processes share."""
    code = "import time\nprint(time.monotonic())\ntime.sleep(0.3)\nprint(time.monotonic())"
    sandboxes = [open_sandbox(limits=SandboxLimits(wall_s=30.0)) for _ in range(3)]
    try:
        count = len(os.sched_getaffinity(0))
        results = await asyncio.gather(*(each.run(code) for each in sandboxes for _ in range(count)))
    finally:
        await asyncio.gather(*(each.close() for each in sandboxes))
    times = [tuple(map(float, result.stdout.split())) for result in results]
    assert max(sum(begin <= at < end for begin, end in times) for at, _ in times) <= count
