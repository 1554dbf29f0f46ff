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
"""A larger price is a mistake."""
MILLION = 1e6
_ROUNDING = 1 + 1e-9
"""Sums of prices that are as much as the limit may come out a little above it."""
_SCHEMA = "CREATE TABLE IF NOT EXISTS spent (id INTEGER PRIMARY KEY CHECK (id = 1), calls INTEGER, tokens INTEGER, usd REAL)"

T = TypeVar("T")


class TokenPrice(Settings):
    """US dollars for a million tokens."""

    prompt: float = Field(ge=0, le=MAX_USD)
    completion: float = Field(ge=0, le=MAX_USD)

    def usd(self, prompt_tokens: int, completion_tokens: int) -> float:
        """The price of these tokens."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / MILLION


class CachedTokenPrice(TokenPrice):
    """US dollars for a million tokens at an endpoint that keeps prompts in a cache."""

    cached: float | None = Field(default=None, ge=0, le=MAX_USD)
    """For tokens of the prompt that were in the cache; as ``prompt`` when ``None``."""

    def usd(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        """The price of these tokens; ``cached_tokens`` are part of the prompt's."""
        cached = min(cached_tokens, prompt_tokens)
        cached_price = self.prompt if self.cached is None else self.cached
        spent = (prompt_tokens - cached) * self.prompt + cached * cached_price
        return (spent + completion_tokens * self.completion) / MILLION


@dataclass(slots=True)
class Spent:
    """Calls, tokens of prompts and replies, and US dollars."""

    calls: int = 0
    tokens: int = 0
    usd: float = 0.0

    def add(self, other: Spent, sign: int = 1) -> None:
        """Count ``other`` too; never below zero when it is taken away."""
        self.calls = max(0, self.calls + sign * other.calls)
        self.tokens = max(0, self.tokens + sign * other.tokens)
        self.usd = max(0.0, self.usd + sign * other.usd)


class BudgetSettings(Settings):
    """The most that all calls together may cost; ``None`` for no limit."""

    calls: int | None = Field(default=None, ge=0)
    """Repeated ones included."""
    tokens: int | None = Field(default=None, ge=0)
    usd: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    file: Path | None = None
    """Counts for all processes that name it, and over restarts; without it each process counts alone."""

    def allows(self, spent: Spent) -> bool:
        """Whether so much stays within every limit."""
        return (
            (self.calls is None or spent.calls <= self.calls)
            and (self.tokens is None or spent.tokens <= self.tokens)
            and (self.usd is None or spent.usd <= self.usd * _ROUNDING)
        )

    def describe(self, spent: Spent) -> str:
        """``3 of 10 calls, 0.5000 of 1 USD``: each limit with what is spent of it."""
        parts = [
            f"{getattr(spent, unit)} of {limit} {unit}"
            for unit in ("calls", "tokens")
            if (limit := getattr(self, unit)) is not None
        ]
        return ", ".join(parts + ([f"{spent.usd:.4f} of {self.usd:g} USD"] if self.usd is not None else []))


class Budget:
    """Lets a call go only when it cannot break the limits, whatever else is in flight.

    Until it ends, a call counts with the most it may cost. One that does not fit waits for calls of this process to cost
    less. It is refused when they cannot make room for it. It may be used in several event loops.

    Args:
        advice: What to do when it is spent, for the error.
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
        """Hold ``most`` while a call runs; what it really cost is added to the :class:`Spent` that this gives.

        Args:
            log: Counts in place of this budget, and includes the call once the block ends.

        Raises:
            BudgetSpentError: It does not fit into what is left.
            EngineError: The budget's file cannot be used at the moment.
            ConfigError: The budget's file cannot be used at all.
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
        """As :meth:`_reserve`; a caller that is cancelled meanwhile holds nothing."""
        reserving = asyncio.ensure_future(self._run(lambda: self._reserve(most, log)))
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:
            if await reserving:
                await self._settled(most, Spent())
            raise

    async def _settled(self, most: Spent, used: Spent) -> None:
        """As :meth:`_settle`, and certainly: a thread that is still waited for when the caller is cancelled may never begin."""
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
        """In a thread where there is a file, which may keep others waiting."""
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
        """Whether there was room for ``most``, which is then counted.

        Raises:
            BudgetSpentError: Nothing is left, and no call in flight can make room.
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
        """Replace what was reserved by what was used."""
        with self._books:
            self._reserved.add(most, -1)
            self._in_flight -= 1
            if not self._in_flight:
                self._reserved = Spent()  # sums of prices leave a rest
            try:
                with self._count() as count:
                    count.add(most, -1)
                    count.add(used)
            finally:
                self._wake()

    @contextmanager
    def _count(self) -> Iterator[Spent]:
        """What is counted so far, reservations included; changes of it are kept."""
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
