"""The sandbox that forks each run from a warm Python into its own namespaces.

An outer bubblewrap jail holds a *zygote*: the sandbox's Python with common packages imported. A run is a fork of the
zygote in fresh user, process, mount, IPC and UTS namespaces. It gets exactly the grants of a jail of
:class:`afm.sandbox.jails.BubblewrapSandbox`. No run can reach its zygote: it has no descriptor of it, does not see its
processes or files, and changes only its own copy of the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from afm.errors import AfmError, SandboxError, SandboxUnavailableError
from afm.sandbox.base import ExitReason, RunResult, SandboxLimits, SandboxSettings
from afm.sandbox.interpreter import EXERCISES, MODULES, STANDARD, WARM, Identity, find_interpreter
from afm.sandbox.jails import BubblewrapJail, find_bubblewrap
from afm.sandbox.run import RunTask, isolation_advice, result_of
from afm.sandbox.seccomp import filter_program
from afm.sandbox.slots import Slots, hold_core, own_cores
from afm.sandbox.usage import RunGroups, group_limit, run_groups
from afm.sandbox.zygote_process import Warmth, Zygote, ZygoteLostError, ZygoteRun, zygote_options

_LOG = logging.getLogger(__name__)
_WORD = re.compile(r"\w+")
_TRIAL = b"import os\nprint(os.getuid() != 0, os.getpid() != 1, os.listdir('/tmp') == ['main.py'])"
_PROBE = RunTask(_TRIAL, b"", SandboxLimits(wall_s=30.0))
_ATTEMPTS = 2
_PROCS = (("--proc", "/proc"), ("--bind", "/proc", "/proc"))  # the second if the first is forbidden


class ZygoteSandbox:
    """Runs each program in a fork of a warm Python."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._max_parallel = settings.max_parallel or own_cores()
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._failed: list[str] = []
        self._opening: Future[_Pool] | None = None
        self._starter = _starter()

    def _forget_parents(self) -> None:
        if self._owner != os.getpid():  # in a fork, the lock, threads and zygotes belong to the parent
            self._reset()

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        """See :class:`afm.sandbox.base.Sandbox`."""
        task = RunTask.from_texts(code, stdin, limits or self._settings.limits)
        trouble: ZygoteLostError | None = None
        for _ in range(_ATTEMPTS):
            pool = await self._ready()
            await _reclaim(pool)
            place = await pool.slots.acquire()
            try:
                async with hold_core(self._settings.max_parallel):
                    return await place.perform(task, pool.level_for(code))
            except ZygoteLostError as error:
                _LOG.warning("a zygote was lost: %s", error)
                trouble = error
            finally:
                pool.slots.release(place)
        raise SandboxError(f"{_ATTEMPTS} zygotes were lost with the same program; the last error: {trouble}")

    async def close(self) -> None:
        """Kill all running programs, end the zygotes and remove the cgroups. A later run opens the sandbox again."""
        self._forget_parents()
        with self._lock:
            opening, self._opening = self._opening, None
            starter, self._starter = self._starter, _starter()
        if opening is not None:
            with contextlib.suppress(AfmError):  # the sandbox never opened
                pool = await asyncio.wrap_future(opening)
                for place in pool.places:
                    place.stop()
                await asyncio.gather(*(asyncio.to_thread(place.close) for place in pool.places))
                await asyncio.sleep(0)  # lets the runs notice
        starter.shutdown(wait=False)

    async def isolation(self) -> list[str]:
        """See :class:`afm.sandbox.base.LocalSandbox`."""
        pool = await self._ready()
        warm = "; ".join(", ".join(group) for group in pool.groups) or "no packages"
        if self._failed:
            warm += f"; not warm, because they fail: {'; '.join(self._failed)}"
        return [
            f"zygote in {pool.jail.path}, {self._max_parallel} runs at a time",
            f"{pool.jail.python}; warm: {warm}",
            *pool.bounded,
        ]

    async def _ready(self) -> _Pool:
        """Return the pool after a real run has shown that it works here."""
        self._forget_parents()
        with self._lock:
            if self._opening is None:
                self._opening = self._starter.submit(self._open)
            opening = self._opening
        try:
            return await asyncio.shield(asyncio.wrap_future(opening))
        except SandboxError:
            with self._lock:
                if self._opening is opening:
                    self._opening = None
            raise

    def _note_failed(self, failed: Sequence[str]) -> None:
        with self._lock:
            new = [text for text in failed if text not in self._failed]
            self._failed += new
        if new:
            _LOG.warning(
                "zygotes cannot load these in advance, and programs will fail to import them: %s",
                "; ".join(new),
            )

    def _open(self) -> _Pool:
        """Find a jail that works, with a trial run that keeps its zygote. Runs in a thread of the starter."""
        bubblewrap = find_bubblewrap("--as-pid-1", "--perms", "--clearenv", "--file")
        identity = Identity.for_process()
        python = find_interpreter(self._settings, identity)
        rules = filter_program()
        groups = self._settings.warm
        if groups is None:
            groups = tuple(group for group in WARM if any(python.has(name) for name in group))
        levels = [_warmth(groups[:n]) for n in range(len(groups) + 1)]
        trouble = ""
        for proc in _PROCS:
            options = zygote_options(python, self._settings.binds, proc)
            jail = BubblewrapJail(bubblewrap, identity, python, rules, options)
            cgroups, bounded = run_groups(self._max_parallel)
            places = [
                ZygotePlace(jail, levels, self._starter, each, self._settings.start_s, self._note_failed)
                for each in cgroups
            ]
            try:
                result = asyncio.run(places[-1].perform(_PROBE, 0))
                if result.stdout == "True True True\n":
                    return _Pool(
                        jail, groups, tuple(bounded), places, Slots(places, self._settings.max_waiting)
                    )
                trouble = trouble or f"the trial run printed {result.stdout!r} {result.stderr!r}"
            except SandboxError as error:
                trouble = trouble or str(error)
            for place in places:
                place.close()
        raise SandboxUnavailableError(
            f"no zygote works here: {isolation_advice(trouble)}; a zygote needs nested user namespaces, "
            "which the backend 'bubblewrap' does not"
        )


@dataclass(frozen=True, slots=True)
class _Pool:
    """The jail of the zygotes, the groups of installed warm packages, and the places of the runs."""

    jail: BubblewrapJail
    groups: tuple[tuple[str, ...], ...]
    bounded: tuple[str, ...]
    places: list[ZygotePlace]
    slots: Slots[ZygotePlace]

    def level_for(self, code: str) -> int:
        """Return the first level whose packages cover those that the program mentions."""
        mentioned = set(_WORD.findall(code))
        return max((n for n, group in enumerate(self.groups, 1) if mentioned & set(group)), default=0)


async def _reclaim(pool: _Pool) -> None:
    """Free the places whose event loop was closed during a run."""
    for place in pool.places:
        if place.run is not None and place.run.abandoned:
            place.run = None
            await asyncio.to_thread(place.end_zygotes)
            pool.slots.release(place)


def _starter() -> ThreadPoolExecutor:
    # Threads start when needed. They belong to the sandbox because a zygote dies with its parent thread.
    return ThreadPoolExecutor(max_workers=4, thread_name_prefix="zygote")


def _warmth(groups: Sequence[Sequence[str]]) -> Warmth:
    names = [name for group in groups for name in group]
    modules = (*STANDARD, *(module for name in names for module in MODULES.get(name, (name,))))
    return Warmth(modules, tuple((name, EXERCISES[name]) for name in names if name in EXERCISES))


class ZygotePlace:
    """A place for one run at a time, with a zygote per level of preloaded modules that starts when first needed.

    Args:
        levels: The warmth of a zygote at each level.
        starter: Starts zygotes. Its threads must outlive them.
        groups: Cgroups of the runs.
        start_s: Seconds that a zygote may take to start a program.
        on_failed: Called with the modules that a new zygote could not load in advance.
    """

    def __init__(
        self,
        jail: BubblewrapJail,
        levels: Sequence[Warmth],
        starter: Executor,
        groups: RunGroups,
        start_s: float,
        on_failed: Callable[[Sequence[str]], None],
    ) -> None:
        self.run: ZygoteRun | None = None
        self._closed = False
        self._jail = jail
        self._levels = levels
        self._starter = starter
        self._groups = groups
        self._start_s = start_s
        self._on_failed = on_failed
        self._zygotes: dict[int, Future[Zygote]] = {}

    async def perform(self, task: RunTask, level: int) -> RunResult:
        """Run a program to its end in the zygote of this level.

        Raises:
            ZygoteLostError: The zygote died or hung, which says nothing about the program.
            SandboxError: No zygote could be started, or the run could not be isolated.
        """
        self._check_open()
        zygote = await self._zygote(level)
        self._check_open()
        kills, limits, groups = self._kills(), task.limits, self._groups
        if groups.memory is not None:
            with contextlib.suppress(OSError):  # a lower limit fails until the last run's memory is free
                groups.memory.limit(group_limit(limits.memory_bytes, limits.file_bytes))
        computed_s = groups.cpu.used_s if groups.cpu is not None else None
        try:
            self.run = ZygoteRun(zygote, task, start_s=self._start_s, computed_s=computed_s)
            ended = await self.run.wait()
        except ZygoteLostError:
            self._check_open()
            raise
        finally:
            self.run = None
        return result_of(replace(ended, out_of_memory=self._kills() > kills), limits)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox was closed while the run waited for its turn")

    def stop(self) -> None:
        """Kill the current run, if any, and refuse further ones."""
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
        # Another zygote may still be warming up for a cancelled run. Its CPU time must not count for this run.
        while others := [
            other for other in self._zygotes.values() if not other.done() and other is not starting
        ]:
            await asyncio.wait([asyncio.ensure_future(_over(other)) for other in others])
        return await asyncio.shield(asyncio.wrap_future(starting))

    def _start(self, level: int) -> Zygote:
        zygote = Zygote(self._jail, self._levels[level], self._groups.add)
        self._on_failed(zygote.failed)
        return zygote

    def _kills(self) -> int:
        return self._groups.memory.kills() if self._groups.memory is not None else 0

    def end_zygotes(self) -> None:
        """Kill the zygotes and everything they forked. Blocks until they are gone."""
        while self._zygotes:
            _end(self._zygotes.popitem()[1])

    def close(self) -> None:
        """End the zygotes and remove the cgroups."""
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
