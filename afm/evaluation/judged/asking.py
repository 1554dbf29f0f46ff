"""Questions to a judge, several at a time, each asked once: what the log holds is not asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afm.errors import EngineError, RewardError
from afm.runs.journal import KeyedJournal

OnProgress = Callable[[int, int], None]
"""Receives how many verdicts are there, those of earlier starts included, and how many there will be."""


@dataclass(frozen=True, slots=True)
class Request:
    """One verdict to get.

    Attributes:
        name: What the caller knows it by.
        key: Digest of everything that the verdict depends on.
        ask: Gets the row to keep, without its key; raises ``RewardError`` where there is no verdict.
    """

    name: tuple[Any, ...]
    key: str
    ask: Callable[[], Awaitable[dict[str, Any]]]


@dataclass(slots=True)
class Asking:
    """Gets verdicts.

    Attributes:
        log: Where they are kept.
        parallel: Requests in flight.
        max_failed_share: Of all requests; more without a verdict end this with an error.
    """

    log: KeyedJournal
    parallel: int
    max_failed_share: float
    on_progress: OnProgress | None = None

    async def verdicts(self, requests: Sequence[Request]) -> dict[tuple[Any, ...], Mapping[str, Any] | None]:
        """The row of each request by its name; ``None`` where the judge gave no verdict.

        Raises:
            EngineError: Too many have none. What was said is kept; asked again, only the rest is.
        """
        found: dict[tuple[Any, ...], Mapping[str, Any] | None] = {}
        waiting = iter(requests)
        failed = 0

        async def worker(waiting: Iterator[Request]) -> None:
            nonlocal failed
            for request in waiting:
                try:
                    found[request.name] = await self._verdict(request)
                except RewardError as error:
                    found[request.name] = None
                    failed += 1
                    self._check(failed, len(requests), error)
                if self.on_progress is not None:
                    self.on_progress(len(found), len(requests))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.parallel, len(requests))):
                    group.create_task(worker(waiting))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return found

    async def _verdict(self, request: Request) -> Mapping[str, Any]:
        known = self.log.find(request.key)
        if known is not None:
            return known
        row = {"key": request.key, **await request.ask()}
        self.log.add(row)
        return row

    def _check(self, failed: int, total: int, error: RewardError) -> None:
        if failed > self.max_failed_share * total:
            raise EngineError(
                f"{failed} of {total} requests to the judge have no verdict; at most {self.max_failed_share:.0%} may. "
                f"The last one: {error}. Remove the cause and run again: what the judge said is kept"
            ) from None
