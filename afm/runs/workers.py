"""Runs jobs in parallel, up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

JobT = TypeVar("JobT")


async def work_in_parallel(
    jobs: Iterable[JobT], work: Callable[[JobT], Awaitable[None]], parallel: int
) -> None:
    """Do ``work`` on every job, ``parallel`` at a time; jobs are read one by one, when a worker is free.

    Raises:
        Exception: The first one that a job raised; it ended the others.
    """
    todo = iter(jobs)

    async def worker() -> None:
        for job in todo:
            await work(job)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(worker())
    except* Exception as errors:
        raise _first(errors) from errors


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
