"""Let a team work through many tasks at once, with everything it does in the event log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from afm.datasets import Task
from afm.distill.record import EventLog, Recorder
from afm.errors import DataError, EngineError, SandboxUnavailableError, ToolError
from afm.tools import Tool


class Team(Protocol):
    """A team of agents that solves tasks, scripted or with models behind it."""

    @property
    def name(self) -> str:
        """Identifies the team in logs and manifests."""
        ...

    async def solve(self, recorder: Recorder) -> None:
        """Work on ``recorder.task`` until ``recorder.finish`` or ``recorder.fail``.

        Raises:
            ToolError, EngineError: Infrastructure failed; the attempt is logged as failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Collected:
    """What one run of a team did.

    Attributes:
        finished: Tasks answered now.
        resumed: Tasks found finished in the log.
        failed: Tasks without an answer; the next run tries them again.
    """

    finished: int = 0
    resumed: int = 0
    failed: int = 0


async def collect(
    tasks: Iterable[Task],
    team: Team,
    tools: Mapping[str, Tool],
    log: EventLog,
    *,
    parallel: int = 4,
    max_failures_in_a_row: int = 20,
    on_done: Callable[[], None] | None = None,
) -> Collected:
    """Let ``team`` work on every task that ``log`` does not hold as finished, ``parallel`` at a time.

    Args:
        tasks: Read one by one; their order is kept in the log as the position.
        on_done: Called after each task, resumed ones included.

    Raises:
        DataError: Two tasks have the same id.
        EngineError: ``max_failures_in_a_row`` tasks failed one after the other.
        SandboxUnavailableError: Code cannot be run here at all.
    """
    counts: Counter[str] = Counter()
    positions = _distinct(tasks)
    in_a_row = 0

    async def work() -> None:
        nonlocal in_a_row
        for position, task in positions:
            outcome = await _attempt(task, position, team, tools, log)
            counts[outcome] += 1
            in_a_row = in_a_row + 1 if outcome == "failed" else 0
            if on_done is not None:
                on_done()
            if in_a_row >= max_failures_in_a_row:
                raise EngineError(f"{in_a_row} tasks in a row failed; see the `error` events in {log.path}")

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(work())
    except* Exception as errors:  # the first failure ended the others; report it alone
        raise _first(errors) from errors
    return Collected(**counts)


async def _attempt(task: Task, position: int, team: Team, tools: Mapping[str, Tool], log: EventLog) -> str:
    if task.id in log.finished:
        return "resumed"
    recorder = log.begin(task, position, tools)
    try:
        await team.solve(recorder)
    except SandboxUnavailableError:
        raise
    except (ToolError, EngineError) as error:
        recorder.fail(f"{type(error).__name__}: {error}")
    if not recorder.ended:
        recorder.fail("the team ended without an answer")
    return "finished" if task.id in log.finished else "failed"


def _distinct(tasks: Iterable[Task]) -> Iterator[tuple[int, Task]]:
    seen: set[str] = set()
    for position, task in enumerate(tasks):
        if task.id in seen:
            raise DataError(f"task id {task.id!r} occurs twice; ids must be unique")
        seen.add(task.id)
        yield position, task


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
