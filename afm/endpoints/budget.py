"""Prices of model calls, and a budget that concurrent calls cannot exceed."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from afm.configuration import Settings
from afm.errors import BudgetSpentError, EngineError
from afm.sqlite import SharedFile

MAX_USD = 1e9
"""Maximum price. A larger one is a mistake."""
MILLION = 1e6
_ROUNDING = 1 + 1e-9
"""Tolerance for sums of prices, which rounding may raise above the limit."""
_SCHEMA = "CREATE TABLE IF NOT EXISTS spent (id INTEGER PRIMARY KEY CHECK (id = 1), calls INTEGER, tokens INTEGER, usd REAL)"

T = TypeVar("T")


class TokenPrice(Settings):
    """Price in US dollars per million tokens."""

    prompt: float = Field(ge=0, le=MAX_USD)
    completion: float = Field(ge=0, le=MAX_USD)

    def usd(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return the price in US dollars."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / MILLION


class CachedTokenPrice(TokenPrice):
    """Price in US dollars per million tokens at an endpoint with a prompt cache."""

    cached: float | None = Field(default=None, ge=0, le=MAX_USD)
    """Price of cached prompt tokens. The same as ``prompt`` if ``None``."""

    def usd(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        """Return the price in US dollars. ``cached_tokens`` are included in ``prompt_tokens``."""
        cached = min(cached_tokens, prompt_tokens)
        cached_price = self.prompt if self.cached is None else self.cached
        spent = (prompt_tokens - cached) * self.prompt + cached * cached_price
        return (spent + completion_tokens * self.completion) / MILLION


@dataclass(slots=True)
class Spent:
    """An amount of calls, tokens (prompts and replies) and US dollars."""

    calls: int = 0
    tokens: int = 0
    usd: float = 0.0

    def add(self, other: Spent, sign: int = 1) -> None:
        """Add ``other``, or subtract it with ``sign=-1``. No count falls below zero."""
        self.calls = max(0, self.calls + sign * other.calls)
        self.tokens = max(0, self.tokens + sign * other.tokens)
        self.usd = max(0.0, self.usd + sign * other.usd)


class BudgetSettings(Settings):
    """Limits of all calls together. ``None`` means no limit."""

    calls: int | None = Field(default=None, ge=0)
    """Maximum number of calls, including retries."""
    tokens: int | None = Field(default=None, ge=0)
    usd: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    file: Path | None = None
    """Counts for all processes that use this file, and across restarts. Without it, each process counts separately."""

    def allows(self, spent: Spent) -> bool:
        """Return whether ``spent`` is within every limit."""
        return (
            (self.calls is None or spent.calls <= self.calls)
            and (self.tokens is None or spent.tokens <= self.tokens)
            and (self.usd is None or spent.usd <= self.usd * _ROUNDING)
        )

    def describe(self, spent: Spent) -> str:
        """Return each limit with the amount spent, such as ``3 of 10 calls, 0.5000 of 1 USD``."""
        parts = [
            f"{getattr(spent, unit)} of {limit} {unit}"
            for unit in ("calls", "tokens")
            if (limit := getattr(self, unit)) is not None
        ]
        return ", ".join(parts + ([f"{spent.usd:.4f} of {self.usd:g} USD"] if self.usd is not None else []))


class Budget:
    """A budget that admits a call only if it cannot exceed the limits, together with all calls in flight.

    Until a call ends, its maximum cost is reserved. A call that does not fit waits until other calls of this process end
    with a lower cost. It is rejected if they cannot make room. A budget may be used in several event loops.

    Args:
        advice: Next step when the budget is spent, for the error.
    """

    def __init__(self, limits: BudgetSettings, advice: str = "raise `budget`") -> None:
        self._limits = limits
        self._advice = advice
        self._file = SharedFile(limits.file, "ledger of a budget", _SCHEMA) if limits.file else None
        self._books = threading.RLock()
        self._counted = Spent()
        self._reserved = Spent()
        self._in_flight = 0
        self._lock = threading.Lock()
        self._ended = 0
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def reserved(self, most: Spent, log: Spent | None = None) -> AsyncIterator[Spent]:
        """Reserve ``most`` while a call runs. The caller adds the actual cost to the yielded :class:`Spent`.

        Args:
            log: Replaces the budget's own count. It includes the call once the block ends.

        Raises:
            BudgetSpentError: The call does not fit into the rest of the budget.
            EngineError: The budget's file is temporarily unusable.
            ConfigError: The budget's file is unusable.
        """
        ended = self._ended
        while not await self._granted(most, log):
            await self._another_end(ended)
            ended = self._ended
        used = Spent()
        try:
            yield used
        finally:
            await self._settled(most, used if log is None else Spent())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    async def _granted(self, most: Spent, log: Spent | None) -> bool:
        """Do the same as :meth:`_reserve`. A cancelled caller keeps no reservation."""
        reserving = asyncio.ensure_future(self._run(lambda: self._reserve(most, log)))
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:
            if await reserving:
                await self._settled(most, Spent())
            raise

    async def _settled(self, most: Spent, used: Spent) -> None:
        """Do the same as :meth:`_settle`, even if the caller is cancelled before its thread begins."""
        calls = iter((True,))

        def settle() -> None:
            with self._books:
                if next(calls, False):
                    self._settle(most, used)

        try:
            await self._run(settle)
        finally:
            settle()

    async def _run(self, work: Callable[[], T]) -> T:
        """Run ``work``, in a thread if the budget has a file, because its lock may block."""
        return work() if self._file is None else await asyncio.to_thread(work)

    async def _another_end(self, ended: int) -> None:
        """Wait until more than ``ended`` calls have ended."""
        with self._lock:
            if self._ended > ended:
                return
            end = asyncio.get_running_loop().create_future()
            self._waiting.append(end)
        await end

    def _reserve(self, most: Spent, log: Spent | None) -> bool:
        """Reserve ``most`` if there is room. Returns whether there was.

        Raises:
            BudgetSpentError: There is no room, and no call in flight can make any.
        """
        with self._books:
            with self._count() as count:
                total = replace(count)
                if log is not None:
                    total.add(log)
                total.add(most)
                fits = self._limits.allows(total)
                if fits:
                    count.add(most)
            if fits:
                self._reserved.add(most)
                self._in_flight += 1
                return True
            total.add(self._reserved, -1)
            if self._in_flight and self._limits.allows(total):
                return False
        total.add(most, -1)
        raise BudgetSpentError(
            f"the budget is spent: {self._limits.describe(total)}, and the next call might exceed it; {self._advice}"
        )

    def _settle(self, most: Spent, used: Spent) -> None:
        """Replace a reservation by the actual cost."""
        with self._books:
            self._reserved.add(most, -1)
            self._in_flight -= 1
            if not self._in_flight:
                self._reserved = Spent()  # sums of prices leave a rounding error
            try:
                with self._count() as count:
                    count.add(most, -1)
                    count.add(used)
            finally:
                self._wake()

    @contextmanager
    def _count(self) -> Iterator[Spent]:
        """Yield the count so far, including reservations. Changes to it are stored."""
        if self._file is None:
            yield self._counted
            return
        try:
            with self._file.transaction() as connection:
                row = connection.execute("SELECT calls, tokens, usd FROM spent").fetchone()
                count = Spent(*row) if row else Spent()
                yield count
                values = (count.calls, count.tokens, count.usd)
                connection.execute("INSERT OR REPLACE INTO spent VALUES (1, ?, ?, ?)", values)
        except sqlite3.Error as error:
            raise EngineError(f"{self._file.path}: the ledger of the budget failed: {error}") from error

    def _wake(self) -> None:
        with self._lock:
            self._ended += 1
            waiting, self._waiting = self._waiting, []
        for end in waiting:
            with suppress(RuntimeError):  # its loop is closed
                end.get_loop().call_soon_threadsafe(_finish, end)


def _finish(end: asyncio.Future[None]) -> None:
    if not end.done():
        end.set_result(None)
