"""Many responses at once: order, bounds and errors."""

from __future__ import annotations

import asyncio

import pytest
from answered import answered

from afm.errors import ConfigError
from afm.rewards import Sample, load_reward, score_many
from afm.rewards.base import in_order


def sample(answer: str, source: str = "math_dapo") -> Sample:
    return answered("math", source, rf"\boxed{{{answer}}}", r"\frac12")


async def test_work_in_order_is_bounded_and_ends_with_its_caller() -> None:
    running: list[int] = []
    most, seconds = 0, 0.01

    async def work(item: int) -> int:
        nonlocal most
        running.append(item)
        most = max(most, len(running))
        try:
            await asyncio.sleep(seconds if item else 0.05)
        finally:
            running.remove(item)
        return item

    assert [item async for item in in_order(work, range(7), 3)] == list(range(7))
    assert most == 3
    seconds = 60
    async with asyncio.timeout(10):
        results = in_order(work, range(7), 3)
        assert await anext(results) == 0
        await results.aclose()
    assert running == []


async def test_a_slow_item_holds_up_none_but_those_beyond_what_is_taken_ahead() -> None:
    finished: list[int] = []
    waited_for = 5
    release = asyncio.Event()

    async def work(item: int) -> int:
        if item == 0:
            await release.wait()
        finished.append(item)
        if item == waited_for:
            release.set()
        return item

    async with asyncio.timeout(10):
        assert [item async for item in in_order(work, range(7), 2)] == list(range(7))
        assert finished[:5] == [1, 2, 3, 4, 5]
        finished, waited_for = [], 2
        release.clear()
        items = iter(range(7))
        results = in_order(work, items, 2, ahead=3)
        assert await anext(results) == 0
        assert next(items) == 3
        assert [item async for item in results] == [1, 2, 4, 5, 6]


async def test_a_source_without_scorer_is_an_error_and_ends_the_others() -> None:
    reward = load_reward()
    with pytest.raises(ConfigError, match="no reward for data_source 'unheard_of'"):
        await score_many(reward, [sample("1"), sample("1", "unheard_of"), sample("10^{10^{10}}")])
    await reward.close()
    assert len(asyncio.all_tasks()) == 1
