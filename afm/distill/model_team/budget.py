"""What a whole run may cost in money and tokens, counted from its event log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from afm.distill.model_team.settings import BudgetSettings
from afm.distill.record import Spent
from afm.errors import BudgetSpentError

_ROUNDING = 1 + 1e-9
"""Sums of prices that are as much as the limit may come out a little above it."""


@dataclass(slots=True)
class Budget:
    """Lets a call go only when it cannot break the limits, whatever else is in flight.

    Calls in flight are counted with what they may cost at most; a call that does not fit waits for them to
    cost less.
    """

    limits: BudgetSettings
    _usd: float = 0.0
    _tokens: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def reserved(self, spent: Spent, usd: float, tokens: int) -> AsyncIterator[None]:
        """Hold so much while a call runs; what it really cost must be in ``spent`` when the block ends.

        Args:
            spent: Of the run, up to date at all times.

        Raises:
            BudgetSpentError: It does not fit into what is left.
        """
        async with self._changed:
            while not self._fits(spent, self._usd + usd, self._tokens + tokens):
                if not self._fits(spent, usd, tokens):
                    raise BudgetSpentError(self._told(spent))
                await self._changed.wait()
            self._usd += usd
            self._tokens += tokens
        try:
            yield
        finally:
            self._usd -= usd
            self._tokens -= tokens
            async with self._changed:
                self._changed.notify_all()

    def _fits(self, spent: Spent, usd: float, tokens: int) -> bool:
        most = self.limits
        return (most.usd is None or spent.usd + usd <= most.usd * _ROUNDING) and (
            most.tokens is None or spent.tokens + tokens <= most.tokens
        )

    def _told(self, spent: Spent) -> str:
        parts = []
        if self.limits.usd is not None:
            parts.append(f"{spent.usd:.4f} of {self.limits.usd:g} USD")
        if self.limits.tokens is not None:
            parts.append(f"{spent.tokens} of {self.limits.tokens} tokens")
        return (
            f"the budget is spent: {', '.join(parts)}, and the next call might exceed it; "
            "raise `budget` in the team's file and run the same command again"
        )
