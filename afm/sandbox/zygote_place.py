"""Room for one run at a time: its zygotes, its memory cgroup, the run in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

from afm.errors import SandboxError
from afm.sandbox.base import ExitReason, RunResult, SandboxLimits
from afm.sandbox.cgroup import RunGroups, group_limit
from afm.sandbox.outcome import outcome
from afm.sandbox.policy import INODES, kernel_limits
from afm.sandbox.zygote_process import RunOrder, Warmth, Zygote, ZygoteJail
from afm.sandbox.zygote_run import ZygoteLostError, ZygoteRun


@dataclass(frozen=True, slots=True)
class ZygoteTask:
    """A program to run.

    Attributes:
        level: Index of the zygote that suits it.
    """

    program: bytes
    stdin: bytes
    limits: SandboxLimits
    level: int
    stdin_named: bool = True


class ZygotePlace:
    """A zygote for each level of preloaded modules, started when first needed.

    Args:
        levels: How warm a zygote is at each level.
        starter: Starts zygotes; its threads must outlive them.
        groups: Cgroups of the runs.
        start_s: How long a zygote may take to get a program started.
        told: Called with what a new zygote could not load beforehand.
    """

    def __init__(
        self,
        jail: ZygoteJail,
        levels: Sequence[Warmth],
        starter: Executor,
        groups: RunGroups,
        start_s: float,
        told: Callable[[Sequence[str]], None],
    ) -> None:
        self.run: ZygoteRun | None = None
        self._closed = False
        self._jail = jail
        self._levels = levels
        self._starter = starter
        self._groups = groups
        self._start_s = start_s
        self._told = told
        self._zygotes: dict[int, Future[Zygote]] = {}

    async def perform(self, job: ZygoteTask) -> RunResult:
        """Run a program to its end.

        Raises:
            ZygoteLostError: The zygote died or hung; nothing is known about the program.
            SandboxError: No zygote could be started, or the run could not be isolated.
        """
        self._check_open()
        zygote = await self._zygote(job.level)
        self._check_open()
        kills = self._kills()
        limits, groups = job.limits, self._groups
        if groups.memory is not None:
            with contextlib.suppress(OSError):  # a lower limit waits until the last run's memory is free
                groups.memory.limit(group_limit(limits.memory_bytes, limits.file_bytes))
        try:
            self.run = ZygoteRun(
                zygote,
                RunOrder(kernel_limits(limits), limits.file_bytes, INODES, job.stdin_named),
                job.program,
                job.stdin,
                limits=limits,
                start_s=self._start_s,
                computed_s=groups.cpu.used_s if groups.cpu is not None else None,
            )
            ended = await self.run.wait()
        except ZygoteLostError:
            self._check_open()
            raise
        finally:
            self.run = None
        return outcome(replace(ended, out_of_memory=self._kills() > kills), limits)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox was closed while the run waited for its turn")

    def stop(self) -> None:
        """Kill the run in it, if any, and take no other."""
        self._closed = True
        if self.run is not None and not self.run.abandoned:
            self.run.stop(ExitReason.KILLED)

    async def _zygote(self, level: int) -> Zygote:
        starting = self._zygotes.get(level)
        if starting is not None and starting.done() and not _lives(starting):
            del self._zygotes[level]
            await asyncio.to_thread(_end, starting)
            self._check_open()
            starting = None
        if starting is None:
            starting = self._starter.submit(self._start, level)
            self._zygotes[level] = starting
        # Another one may still be warming up for a run that was cancelled: its work is not this run's.
        while others := [
            other for other in self._zygotes.values() if not other.done() and other is not starting
        ]:
            await asyncio.wait([asyncio.ensure_future(_over(other)) for other in others])
        return await asyncio.shield(asyncio.wrap_future(starting))

    def _start(self, level: int) -> Zygote:
        zygote = Zygote(self._jail, self._levels[level], self._groups.add)
        self._told(zygote.failed)
        return zygote

    def _kills(self) -> int:
        return self._groups.memory.kills() if self._groups.memory is not None else 0

    def end_zygotes(self) -> None:
        """Kill the zygotes with all they forked; blocks until they are gone."""
        while self._zygotes:
            _end(self._zygotes.popitem()[1])

    def close(self) -> None:
        """:meth:`end_zygotes`, and remove the cgroups."""
        self.end_zygotes()
        self._groups.remove()


async def _over(starting: Future[Zygote]) -> None:
    with contextlib.suppress(SandboxError, asyncio.CancelledError):
        await asyncio.shield(asyncio.wrap_future(starting))


def _lives(starting: Future[Zygote]) -> bool:
    return not starting.cancelled() and starting.exception() is None and starting.result().alive


def _end(starting: Future[Zygote]) -> None:
    starting.cancel()
    with contextlib.suppress(SandboxError, asyncio.CancelledError):
        if not starting.cancelled():
            starting.result().end()
