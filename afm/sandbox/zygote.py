"""The sandbox whose runs are forked from a warm Python, each into namespaces of its own.

An outer bubblewrap jail holds a *zygote*: the sandbox's Python with common packages imported. A run is a fork
of it in fresh user, process, mount, IPC and UTS namespaces, with what a jail of
:class:`afm.sandbox.bubblewrap.BubblewrapSandbox` grants and nothing more. No run can reach its zygote: it has
no descriptor of it, does not see its processes or files, and changes only its own copy of its memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from afm.errors import AfmError, SandboxError, SandboxUnavailableError
from afm.sandbox.base import NamelessInput, RunResult, SandboxLimits
from afm.sandbox.bubblewrap import find_bubblewrap
from afm.sandbox.cgroup import run_groups
from afm.sandbox.interpreter import (
    EXERCISES,
    MODULES,
    STANDARD,
    WARM,
    Identity,
    check_readable,
    find_interpreter,
)
from afm.sandbox.policy import (
    binds_of_runs,
    encoded,
    groups_of_packages,
    host_paths,
    limits_or_default,
    parallel_runs,
    path_of_python,
    seconds,
    user_namespace_advice,
    whole_number,
)
from afm.sandbox.seccomp import filter_program
from afm.sandbox.slots import Slots, cores
from afm.sandbox.zygote_process import Warmth, ZygoteJail, jail_options
from afm.sandbox.zygote_run import ZygoteLostError, ZygotePlace, ZygoteTask

_LOG = logging.getLogger(__name__)
_WORD = re.compile(r"\w+")
_TRIAL = b"import os\nprint(os.getuid() != 0, os.getpid() != 1, os.listdir('/tmp') == ['main.py'])"
_PROBE = ZygoteTask(_TRIAL, b"", SandboxLimits(wall_s=30.0), 0)
_ATTEMPTS = 2
_PROCS = (("--proc", "/proc"), ("--bind", "/proc", "/proc"))  # the second where the first is forbidden


class ZygoteSandbox:
    """Runs each program in a fork of a warm Python.

    Args:
        python: The sandbox's Python; ``/usr/bin/python3`` when ``None``.
        limits: Bounds of a run that names none.
        max_parallel: Runs at the same time, each in a zygote of its own; when ``None`` the number of cores, shared with the
            other sandboxes of this process (:class:`afm.sandbox.slots.Cores`).
        max_waiting: Runs that may wait for a zygote; further ones raise ``SandboxBusyError`` at once.
        binds: Further host paths that programs may read.
        packages: Folders of further packages; those of ``afm sandbox install`` when ``None``.
        warm: Packages to import beforehand, in groups; those of :data:`afm.sandbox.interpreter.WARM` that are installed
            when ``None``. One that cannot be imported is logged. A program gets the first zygote that covers the
            names it mentions; one that mentions none gets a small and faster zygote. It can import the others all
            the same.
        start_s: How long a zygote may take to get a program started before it counts as hung.

    Raises:
        ConfigError: An argument is of the wrong kind.
    """

    def __init__(
        self,
        *,
        python: str | None = None,
        limits: SandboxLimits | None = None,
        max_parallel: int | None = None,
        max_waiting: int = 1 << 16,
        binds: Sequence[str] = (),
        packages: Sequence[str] | None = None,
        warm: Sequence[Sequence[str]] | None = None,
        start_s: float = 20.0,
    ) -> None:
        self._python = path_of_python(python)
        self._limits = limits_or_default(limits)
        self._max_parallel = parallel_runs(max_parallel)
        self._shares = max_parallel is None
        self._max_waiting = whole_number("max_waiting", max_waiting, 0)
        self._binds = binds_of_runs(binds)
        self._packages = None if packages is None else host_paths("packages", packages)
        self._warm = None if warm is None else groups_of_packages("warm", warm)
        self._start_s = seconds("start_s", start_s)
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._failed: list[str] = []
        self._opening: concurrent.futures.Future[_Pool] | None = None
        self._starter = _starter()

    def _forget_parents(self) -> None:
        if self._owner != os.getpid():  # a fork of the owner: lock, threads and zygotes are the parent's
            self._reset()

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        """See :class:`afm.sandbox.base.Sandbox`.

        Raises:
            DataError: ``code`` or ``stdin`` is larger than the limits allow.
            SandboxBusyError: Too many runs wait already.
        """
        limits = limits or self._limits
        program = encoded("the program", code, limits.file_bytes)
        data, named = encoded("stdin", stdin, limits.stdin_bytes), not isinstance(stdin, NamelessInput)
        trouble: ZygoteLostError | None = None
        for _ in range(_ATTEMPTS):
            pool = await self._ready()
            await _reclaim(pool)
            place = await pool.slots.acquire()
            try:
                async with cores().hold() if self._shares else contextlib.nullcontext():
                    return await place.perform(ZygoteTask(program, data, limits, pool.level_for(code), named))
            except ZygoteLostError as error:
                _LOG.warning("a zygote was lost: %s", error)
                trouble = error
            finally:
                pool.slots.release(place)
        raise SandboxError(f"{_ATTEMPTS} zygotes were lost with the same program, the last one: {trouble}")

    async def close(self) -> None:
        """Kill what still runs, end the zygotes, remove the cgroups. A later run opens the sandbox again."""
        self._forget_parents()
        with self._lock:
            opening, self._opening = self._opening, None
            starter, self._starter = self._starter, _starter()
        if opening is not None:
            with contextlib.suppress(AfmError):  # it never opened
                pool = await asyncio.wrap_future(opening)
                for place in pool.places:
                    place.stop()
                await asyncio.gather(*(asyncio.to_thread(place.close) for place in pool.places))
                await asyncio.sleep(0)  # the runs learn of it
        starter.shutdown(wait=False)

    async def isolation(self) -> list[str]:
        """What stands between programs and the host, in sentences.

        Raises:
            SandboxUnavailableError: No isolation on this machine.
        """
        pool = await self._ready()
        warm = "; ".join(", ".join(group) for group in pool.groups) or "no packages"
        if self._failed:
            warm += f"; not warm, because they fail: {'; '.join(self._failed)}"
        return [
            f"zygote in {pool.jail.bubblewrap}, {self._max_parallel} runs at a time",
            f"Python {'.'.join(map(str, pool.jail.python.version))} ({pool.jail.python.binary}); warm: {warm}",
            *pool.bounded,
        ]

    async def _ready(self) -> _Pool:
        """The pool, after one real run has shown that it works here."""
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
                "zygotes cannot load everything beforehand, programs will fail likewise: %s", "; ".join(new)
            )

    def _open(self) -> _Pool:
        """In a starter's thread: find a jail that works, by a trial run that keeps its zygote."""
        bubblewrap = find_bubblewrap("--as-pid-1", "--perms", "--clearenv", "--file")
        identity = Identity.for_process()
        python = find_interpreter(self._python, identity, self._packages)
        check_readable("binds", self._binds, identity)
        rules = filter_program()
        groups = self._warm
        if groups is None:
            groups = tuple(group for group in WARM if any(python.has(name) for name in group))
        levels = [_warmth(groups[:n]) for n in range(len(groups) + 1)]
        trouble = ""
        for proc in _PROCS:
            jail = ZygoteJail(bubblewrap, identity, python, jail_options(python, self._binds, proc), rules)
            cgroups, bounded = run_groups(self._max_parallel)
            places = [
                ZygotePlace(jail, levels, self._starter, each, self._start_s, self._note_failed)
                for each in cgroups
            ]
            try:
                result = asyncio.run(places[-1].perform(_PROBE))
                if result.stdout == "True True True\n":
                    return _Pool(jail, groups, tuple(bounded), places, Slots(places, self._max_waiting))
                trouble = trouble or f"the trial run printed {result.stdout!r} {result.stderr!r}"
            except SandboxError as error:
                trouble = trouble or str(error)
            for place in places:
                place.close()
        raise SandboxUnavailableError(
            f"no zygote works here: {user_namespace_advice(trouble)}; a zygote needs user namespaces inside "
            "a user namespace, the backend 'bubblewrap' does without"
        )


@dataclass(frozen=True, slots=True)
class _Pool:
    """Groups of warm packages that are installed, and the places of the runs."""

    jail: ZygoteJail
    groups: tuple[tuple[str, ...], ...]
    bounded: tuple[str, ...]
    places: list[ZygotePlace]
    slots: Slots[ZygotePlace]

    def level_for(self, code: str) -> int:
        """The first level whose packages cover those that the program mentions."""
        mentioned = set(_WORD.findall(code))
        return max((n for n, group in enumerate(self.groups, 1) if mentioned & set(group)), default=0)


async def _reclaim(pool: _Pool) -> None:
    """Free the places whose event loop was closed in the middle of a run."""
    for place in pool.places:
        if place.run is not None and place.run.abandoned:
            place.run = None
            await asyncio.to_thread(place.end_zygotes)
            pool.slots.release(place)


def _starter() -> ThreadPoolExecutor:
    # Threads start when needed. A zygote dies with the thread that started it, so they are our own.
    return ThreadPoolExecutor(max_workers=4, thread_name_prefix="zygote")


def _warmth(groups: Sequence[Sequence[str]]) -> Warmth:
    names = [name for group in groups for name in group]
    modules = (*STANDARD, *(module for name in names for module in MODULES.get(name, (name,))))
    return Warmth(modules, tuple((name, EXERCISES[name]) for name in names if name in EXERCISES))
