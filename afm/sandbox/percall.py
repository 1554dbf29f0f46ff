"""What the sandboxes that start a jail for each run have in common."""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from afm.errors import SandboxError, SandboxUnavailableError
from afm.sandbox.base import ExitReason, RunResult, SandboxLimits
from afm.sandbox.interpreter import Interpreter
from afm.sandbox.outcome import outcome
from afm.sandbox.policy import MEMORY_PER_PROCESS, PROGRAM, encoded, kernel_limits, user_namespace_advice
from afm.sandbox.process import JailedProcess
from afm.sandbox.slots import Slots

_PROBE = "import os\nprint(os.getuid() != 0, os.listdir('/tmp') == ['main.py'])"
_PROBE_LIMITS = SandboxLimits(wall_s=30.0)
J = TypeVar("J")


class PerCallSandbox(ABC, Generic[J]):
    """Runs each program in a fresh jail, ``J`` being what is the same for every jail.

    Args:
        python: The sandbox's Python; ``/usr/bin/python3`` when ``None``. The unprivileged user must be
            able to read it, so not one below a home directory.
        limits: Bounds of a run that names none.
        max_parallel: Runs at the same time, further ones wait; the number of cores when ``None``.
        max_waiting: Runs that may wait; further ones raise ``SandboxBusyError`` at once.
        binds: Further host paths that programs may read.
        packages: Folders of further packages; those of ``afm sandbox install`` when ``None``.
    """

    name: str

    def __init__(
        self,
        *,
        python: str | None = None,
        limits: SandboxLimits | None = None,
        max_parallel: int | None = None,
        max_waiting: int = 1 << 16,
        binds: Sequence[str] = (),
        packages: Sequence[str] | None = None,
    ) -> None:
        self._python = python
        self._limits = limits or SandboxLimits()
        self._binds = tuple(binds)
        self._packages = packages
        self._max_parallel = max_parallel or len(os.sched_getaffinity(0))
        self._slots = Slots(range(self._max_parallel), max_waiting)
        self._opening = Slots(("the door",), max_waiting)
        self._jail: J | None = None
        self._running: set[JailedProcess] = set()
        self._spawner = _spawner()

    @abstractmethod
    def _candidates(self) -> list[J]:
        """Jails to try, the tightest first. Blocks.

        Raises:
            SandboxUnavailableError: None can work here.
        """

    @abstractmethod
    def _start(
        self, jail: J, program: bytes, stdin: bytes, limits: SandboxLimits, kept: contextlib.ExitStack
    ) -> JailedProcess:
        """Start a run; ``kept`` is closed at its end."""

    @abstractmethod
    def _described(self, jail: J) -> list[str]:
        """What stands between programs and the host, in sentences."""

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        """See :class:`afm.sandbox.base.Sandbox`.

        Raises:
            DataError: ``code`` or ``stdin`` is larger than the limits allow.
            SandboxBusyError: Too many runs wait already.
        """
        limits = limits or self._limits
        program = encoded("the program", code, limits.file_bytes)
        given = encoded("stdin", stdin, limits.stdin_bytes)
        jail = await self._ready()
        slot = await self._slots.acquire()
        try:
            return await self._run_in(jail, program, given, limits)
        finally:
            self._slots.release(slot)

    async def close(self) -> None:
        """Kill what still runs."""
        running = tuple(self._running)
        for process in running:
            process.stop(ExitReason.KILLED)
        await asyncio.gather(*(process.wait() for process in running), return_exceptions=True)
        self._spawner.shutdown()
        self._spawner = _spawner()

    async def isolation(self) -> list[str]:
        """What stands between programs and the host, in sentences.

        Raises:
            SandboxUnavailableError: No isolation on this machine.
        """
        described = self._described(await self._ready())
        return [*described, MEMORY_PER_PROCESS]

    async def _ready(self) -> J:
        """The jail, after one real run has shown that it works here."""
        if self._jail is None:
            door = await self._opening.acquire()
            try:
                if self._jail is None:
                    self._jail = await self._probed()
            finally:
                self._opening.release(door)
        return self._jail

    async def _probed(self) -> J:
        candidates = await asyncio.to_thread(self._candidates)
        trouble = ""
        for jail in candidates:
            try:
                result = await self._run_in(jail, _PROBE.encode(), b"", _PROBE_LIMITS)
            except SandboxError as error:
                trouble = trouble or str(error)
                continue
            if result.stdout == "True True\n":
                return jail
            trouble = trouble or f"the trial run printed {result.stdout!r} {result.stderr!r}"
        raise SandboxUnavailableError(
            f"{self.name} cannot isolate programs here: {user_namespace_advice(trouble)}"
        )

    async def _run_in(self, jail: J, program: bytes, stdin: bytes, limits: SandboxLimits) -> RunResult:
        try:
            with contextlib.ExitStack() as kept:
                process = self._start(jail, program, stdin, limits, kept)
                self._running.add(process)
                kept.callback(self._running.discard, process)
                return outcome(await process.wait(), limits)
        except OSError as error:
            raise SandboxError(f"{self.name} could not be started: {error}") from error


@cache
def _launcher() -> str:
    return Path(__file__).with_name("launcher.py").read_text(encoding="utf-8")


def launch(python: Interpreter, limits: SandboxLimits, rules: bytes = b"") -> list[str]:
    """The command that runs inside a jail: the launcher, which starts the program at its usual place.

    Args:
        rules: Seccomp filter that the launcher installs, where the jail does not.
    """
    bounds = ",".join(f"{name}={soft}={hard}" for name, (soft, hard) in kernel_limits(limits).items())
    return [
        *(python.binary, "-s", "-S", "-B", "-X", "utf8", "-c", _launcher()),
        *("{report}", PROGRAM, bounds, ":".join(python.imports), rules.hex()),
    ]


def _spawner() -> ThreadPoolExecutor:
    # Threads start with the first run. A jail dies with the thread that started it, so they are our own.
    return ThreadPoolExecutor(max_workers=2, thread_name_prefix="sandbox")
