"""Let a team work through many tasks at once, with everything it does in the event log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from afm.datasets import Task
from afm.distill.record import EventLog, Recorder
from afm.errors import BudgetSpentError, DataError, EngineError, SandboxUnavailableError, ToolError
from afm.tools import Tool

_FAILURES_BEFORE_JUDGEMENT = 20


class Team(Protocol):
    """A team of agents that solves tasks, scripted or with models behind it."""

    @property
    def name(self) -> str:
        """Identifies the team in logs and manifests."""
        ...

    async def solve(self, recorder: Recorder) -> None:
        """Work on ``recorder.task`` until ``recorder.finish``, ``recorder.fail`` or ``recorder.decline``.

        Raises:
            ToolError, EngineError: Infrastructure failed; the attempt is logged as failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Collected:
    """What one run of a team did.

    Attributes:
        finished: Tasks answered now.
        resumed: Tasks that the log holds as finished or declined.
        failed: Tasks without an answer; the next run tries them again.
        declined: Tasks that the team cannot read or does not take; no run tries them again.
        stopped: Why the run ended before its last task, empty when it did not.
    """

    finished: int = 0
    resumed: int = 0
    failed: int = 0
    declined: int = 0
    stopped: str = ""


async def collect(
    tasks: Iterable[Task],
    team: Team,
    tools: Mapping[str, Tool],
    log: EventLog,
    *,
    parallel: int = 4,
    max_failed_share: float = 0.2,
    on_done: Callable[[], None] | None = None,
) -> Collected:
    """Let ``team`` work on every task that ``log`` does not hold as finished, ``parallel`` at a time.

    When the team's budget is spent, no further task begins, those under way end, and the result says why.

    Args:
        tasks: Read one by one; their order is kept in the log as the position.
        on_done: Called after each task, resumed ones included.

    Raises:
        DataError: Two tasks have the same id.
        EngineError: More than ``max_failed_share`` of the tasks tried failed, seen at the 20th failure or later.
        SandboxUnavailableError: Code cannot be run here at all.
    """
    counts: Counter[str] = Counter()
    positions = _distinct(tasks)

    stopped = ""

    async def work() -> None:
        nonlocal stopped
        for position, task in positions:
            if stopped:
                return
            if task.id in log.finished:
                counts["resumed"] += 1
            else:
                end = await _attempt(task, position, team, tools, log)
                counts[end.counts_as] += 1
                stopped = stopped or end.budget
                if end.reason and not stopped:
                    _stop_if_hopeless(counts, max_failed_share, end.reason)
            if on_done is not None:
                on_done()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(work())
    except* Exception as errors:  # the first failure ended the others; report it alone
        raise _first(errors) from errors
    return Collected(**counts, stopped=stopped)


@dataclass(frozen=True, slots=True)
class _End:
    """How an attempt ended.

    Attributes:
        counts_as: The field of :class:`Collected` in which the task counts.
        reason: Why it failed, empty when it did not.
        budget: Says so when the run has no money or tokens left.
    """

    counts_as: str
    reason: str = ""
    budget: str = ""


async def _attempt(task: Task, position: int, team: Team, tools: Mapping[str, Tool], log: EventLog) -> _End:
    """Work on one task until its attempt has ended."""
    recorder, spent = log.begin(task, position, tools), ""
    try:
        await team.solve(recorder)
    except SandboxUnavailableError:
        raise
    except (ToolError, EngineError) as error:
        spent = str(error) if isinstance(error, BudgetSpentError) else ""
        recorder.fail(f"{type(error).__name__}: {error}")
    if not recorder.ended:
        recorder.fail("the team ended without an answer")
    if recorder.failure:
        return _End("failed", recorder.failure, spent)
    return _End("declined" if recorder.declined else "finished")


def _stop_if_hopeless(counts: Counter[str], max_failed_share: float, failure: str) -> None:
    tried = counts["failed"] + counts["finished"]
    if counts["failed"] >= _FAILURES_BEFORE_JUDGEMENT and counts["failed"] > max_failed_share * tried:
        raise EngineError(f"{counts['failed']} of {tried} tasks failed, the last one with: {failure}")


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
