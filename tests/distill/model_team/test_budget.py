import asyncio

import pytest

from afm.distill.model_team.settings import TeamBudget
from afm.distill.model_team.voices import Budget
from afm.distill.record import Spent
from afm.errors import BudgetSpentError


async def two_calls(budget, spent, first_costs):
    """A second call comes while the first one, of at most 60 tokens, is under way; what happened in order."""
    told, leave = [], asyncio.Event()

    async def first():
        async with budget.reserved(spent, 0.0, 60):
            told.append("first in")
            await leave.wait()
            spent.tokens += first_costs
        told.append("first out")

    async def second():
        async with budget.reserved(spent, 0.0, 60):
            told.append("second in")

    running = [asyncio.create_task(first()), asyncio.create_task(second())]
    await asyncio.sleep(0.01)
    leave.set()
    results = await asyncio.gather(*running, return_exceptions=True)
    return told, results[1]


async def test_a_call_waits_for_what_those_in_flight_may_still_cost():
    told, failure = await two_calls(Budget(TeamBudget(tokens=100)), Spent(), first_costs=10)
    assert failure is None
    assert told[0] == "first in"
    assert told[-1] == "second in"


async def test_what_no_longer_fits_is_refused_and_nothing_stays_reserved():
    budget, spent = Budget(TeamBudget(tokens=100)), Spent()
    _, failure = await two_calls(budget, spent, first_costs=60)
    assert isinstance(failure, BudgetSpentError)
    assert "60 of 100 tokens" in str(failure)
    async with budget.reserved(spent, 0.0, 40):
        pass


async def test_money_is_counted_with_what_earlier_runs_spent():
    budget = Budget(TeamBudget(usd=1.0))
    with pytest.raises(BudgetSpentError, match=r"0.9500 of 1 USD"):
        async with budget.reserved(Spent(usd=0.95), 0.1, 10**9):
            pass


async def test_what_costs_exactly_what_is_left_fits():
    budget, spent = Budget(TeamBudget(usd=0.3)), Spent()
    spent.usd = 0.1 + 0.1
    async with budget.reserved(spent, 0.1, 0):
        assert spent.usd + 0.1 > 0.3  # in binary fractions
    with pytest.raises(BudgetSpentError):
        async with budget.reserved(spent, 0.1001, 0):
            pass
