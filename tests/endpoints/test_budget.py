import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from pydantic import ValidationError

from afm.endpoints.budget import Budget, BudgetSettings, CachedTokenPrice, Spent, TokenPrice
from afm.errors import BudgetSpentError, ConfigError


@pytest.fixture(params=["memory", "file"])
def limited(request, tmp_path):
    """Makes a budget, counted in memory or in a file."""

    def make(**limits):
        file = tmp_path / "a folder/budget" if request.param == "file" else None
        return Budget(BudgetSettings(file=file, **limits))

    return make


async def spend(budget, most, used, log=None):
    """One call that costs ``used`` of the ``most`` tokens that it may cost."""
    async with asyncio.timeout(20), budget.reserved(Spent(1, most), log) as spent:
        spent.add(Spent(1, used))


async def two_calls(budget, first_costs):
    """A second call comes while the first one, of at most 60 tokens, is under way; what happened in order."""
    events, began, leave = [], asyncio.Event(), asyncio.Event()

    async def first():
        async with budget.reserved(Spent(1, 60)) as spent:
            events.append("first in")
            began.set()
            await leave.wait()
            spent.add(Spent(1, first_costs))
            events.append("first out")

    async def second():
        await began.wait()
        async with budget.reserved(Spent(1, 60)):
            events.append("second in")

    running = [asyncio.create_task(first()), asyncio.create_task(second())]
    await asyncio.sleep(0.05)
    leave.set()
    async with asyncio.timeout(20):
        results = await asyncio.gather(*running, return_exceptions=True)
    return events, results[1]


async def test_a_call_waits_for_what_those_in_flight_may_still_cost(limited):
    assert await two_calls(limited(tokens=100), first_costs=10) == (
        ["first in", "first out", "second in"],
        None,
    )


async def test_what_no_longer_fits_is_refused_and_nothing_stays_reserved(limited):
    budget = limited(tokens=100)
    _, failure = await two_calls(budget, first_costs=60)
    assert isinstance(failure, BudgetSpentError)
    assert str(failure) == (
        "the budget is spent: 60 of 100 tokens, and the next call might exceed it; raise `budget`"
    )
    await spend(budget, 40, 40)


async def test_what_no_call_in_flight_can_make_room_for_is_refused_at_once(limited):
    budget = limited(tokens=100)
    async with budget.reserved(Spent(1, 60)):
        with pytest.raises(BudgetSpentError, match="0 of 100 tokens"):
            await spend(budget, 101, 0)


async def test_calls_are_counted_and_one_that_was_never_sent_is_not(limited):
    budget = limited(calls=2)
    async with budget.reserved(Spent(1, 5)):
        pass
    for _ in range(2):
        await spend(budget, 5, 5)
    with pytest.raises(BudgetSpentError, match="2 of 2 calls"):
        await spend(budget, 5, 5)


async def test_a_call_that_fails_or_is_cancelled_holds_nothing(limited):
    budget = limited(tokens=60)
    with pytest.raises(RuntimeError):
        async with budget.reserved(Spent(1, 60)):
            raise RuntimeError

    async def forever():
        async with budget.reserved(Spent(1, 60)):
            await asyncio.Event().wait()

    holding, waiting = asyncio.create_task(forever()), asyncio.create_task(forever())
    await asyncio.sleep(0.05)
    for task in (waiting, holding):
        task.cancel()
    await asyncio.gather(holding, waiting, return_exceptions=True)
    for _ in range(20):  # cancelled while the reservation is on its way to the file
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(20):
        await spend(budget, 60, 60)


async def test_a_call_that_is_cancelled_on_its_way_to_the_file_is_settled_all_the_same(tmp_path):
    asyncio.get_running_loop().set_default_executor(threads := ThreadPoolExecutor(1))
    budget, ended, free = Budget(BudgetSettings(tokens=60, file=tmp_path / "b")), asyncio.Event(), Event()

    async def call():
        async with budget.reserved(Spent(1, 60)) as spent:
            await ended.wait()
            spent.add(Spent(1, 10))

    task = asyncio.create_task(call())
    await asyncio.sleep(0.1)
    threads.submit(free.wait)
    ended.set()
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    free.set()
    await spend(budget, 50, 50)
    with pytest.raises(BudgetSpentError, match="60 of 60 tokens"):
        await spend(budget, 1, 1)


async def test_many_calls_at_once_never_exceed_the_budget_and_use_it_up(limited):
    budget, used = limited(tokens=100), []

    async def call():
        async with budget.reserved(Spent(1, 30)) as spent:
            await asyncio.sleep(0)
            spent.add(Spent(1, 10))
            used.append(10)

    async with asyncio.timeout(30):
        results = await asyncio.gather(*(call() for _ in range(30)), return_exceptions=True)
    assert sum(used) == 80  # nine would leave less than the 30 that the next one may cost
    assert sum(isinstance(result, BudgetSpentError) for result in results) == 22


def test_event_loops_in_several_threads_share_a_budget(limited):
    budget = limited(tokens=60)

    async def one_loop():
        async with asyncio.timeout(20):
            for _ in range(10):
                await spend(budget, 60, 1)

    async def all_of_them():
        await asyncio.gather(
            *(asyncio.to_thread(asyncio.run, one_loop()) for _ in range(4)), return_exceptions=True
        )

    asyncio.run(all_of_them())
    with pytest.raises(BudgetSpentError):
        asyncio.run(spend(budget, 60, 1))


SPEND = """
import asyncio, sys
from pathlib import Path
from afm.endpoints.budget import Budget, BudgetSettings, Spent
from afm.errors import BudgetSpentError
async def work():
    budget = Budget(BudgetSettings(calls=100, file=Path(sys.argv[1])))
    for count in range(101):
        try:
            async with budget.reserved(Spent(1, 1)) as spent:
                spent.calls = 1
        except BudgetSpentError:
            return print(count)
asyncio.run(work())
"""


def test_processes_share_a_file(tmp_path):
    command = [sys.executable, "-c", SPEND, str(tmp_path / "budget")]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    counts = [worker.communicate(timeout=60)[0] for worker in workers]
    assert sum(map(int, counts)) == 100


async def test_a_file_that_is_no_budget_is_refused(tmp_path):
    path = tmp_path / "text"
    path.write_text("hello " * 500, encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be used as a ledger of a budget"):
        await spend(Budget(BudgetSettings(calls=1, file=path)), 1, 1)


async def test_a_log_counts_in_place_of_the_budget():
    budget, log = Budget(BudgetSettings(usd=1.0)), Spent(usd=0.95)
    with pytest.raises(BudgetSpentError, match=r"0.9500 of 1 USD"):
        async with budget.reserved(Spent(1, 10**9, 0.1), log):
            pass
    log.usd = 0.1
    async with budget.reserved(Spent(usd=0.9), log) as spent:
        spent.usd = 0.9
    assert log.usd == 0.1  # the caller adds to it


async def test_what_costs_exactly_what_is_left_fits():
    budget, log = Budget(BudgetSettings(usd=0.3)), Spent(usd=0.1 + 0.1)
    async with budget.reserved(Spent(usd=0.1), log):
        assert log.usd + 0.1 > 0.3  # in binary fractions
    with pytest.raises(BudgetSpentError):
        async with budget.reserved(Spent(usd=0.1001), log):
            pass


def test_prices_are_for_a_million_tokens_and_cached_ones_have_their_own():
    assert TokenPrice(prompt=2.0, completion=8.0).usd(500_000, 250_000) == 3.0
    assert CachedTokenPrice(prompt=4, completion=8, cached=1).usd(1_000_000, 0, 500_000) == 2.5
    assert CachedTokenPrice(prompt=4, completion=8).usd(1_000_000, 0, 500_000) == 4.0
    assert CachedTokenPrice(prompt=4, completion=8, cached=1).usd(1_000_000, 0, 2_000_000) == 1.0, (
        "no more than were read"
    )


@pytest.mark.parametrize("usd", [-1, float("nan"), float("inf"), 1e10])
def test_a_price_is_a_number_of_dollars_within_reason(usd):
    with pytest.raises(ValidationError, match="prompt"):
        TokenPrice(prompt=usd, completion=0)
    with pytest.raises(ValidationError, match="cached"):
        CachedTokenPrice(prompt=1, completion=1, cached=usd)
