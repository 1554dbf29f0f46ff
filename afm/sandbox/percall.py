"""What the sandboxes that start a jail for each run have in common."""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from afm.errors import SandboxError, SandboxUnavailableError
from afm.sandbox.base import ExitReason, NamelessInput, RunResult, SandboxLimits
from afm.sandbox.capture import outcome
from afm.sandbox.interpreter import Interpreter
from afm.sandbox.policy import (
    CPU_AS_FAR_AS_SEEN,
    DEVICES,
    MEMORY_PER_PROCESS,
    PROGRAM,
    binds_of_runs,
    encoded,
    host_paths,
    kernel_limits,
    limits_or_default,
    parallel_runs,
    path_of_python,
    user_namespace_advice,
    whole_number,
)
from afm.sandbox.process import JailedProcess
from afm.sandbox.slots import Slots, cores

_PROBE = b"import os\nprint(os.getuid() != 0, os.listdir('/tmp') == ['main.py'])"
J = TypeVar("J")


@dataclass(frozen=True, slots=True)
class JailTask:
    """A program to run."""

    program: bytes
    stdin: bytes
    limits: SandboxLimits
    named: bool = True

    @property
    def device(self) -> bytes:
        """What ``/dev/stdin`` holds."""
        return self.stdin if self.named else b""


_PROBE_TASK = JailTask(_PROBE, b"", SandboxLimits(wall_s=30.0))


class _Life:
    """What a sandbox holds from its opening to its close; a run keeps to the one that it began in."""

    def __init__(self, max_parallel: int, max_waiting: int) -> None:
        self.owner = os.getpid()
        self.closed = False
        self.door = Slots(("the door",), max_waiting)
        self.slots = Slots(range(max_parallel), max_waiting)
        self.running: set[JailedProcess] = set()
        # Threads start with the first run. A jail dies with the thread that started it, so they are our own.
        self.spawner = ThreadPoolExecutor(max_workers=2, thread_name_prefix="sandbox")

    def check_open(self) -> None:
        if self.closed:
            raise SandboxError("the sandbox was closed while the run waited for its turn")


class PerCallSandbox(ABC, Generic[J]):
    """Runs each program in a fresh jail, ``J`` being what is the same for every jail.

    Args:
        python: The sandbox's Python; ``/usr/bin/python3`` when ``None``. The unprivileged user must be
            able to read it, so not one below a home directory.
        limits: Bounds of a run that names none.
        max_parallel: Runs at the same time, further ones wait; when ``None`` the number of cores, shared with the other
            sandboxes of this process (:class:`afm.sandbox.slots.Cores`).
        max_waiting: Runs that may wait; further ones raise ``SandboxBusyError`` at once.
        binds: Further host paths that programs may read.
        packages: Folders of further packages; those of ``afm sandbox install`` when ``None``.

    Raises:
        ConfigError: An argument is of the wrong kind.
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
        self._python = path_of_python(python)
        self._limits = limits_or_default(limits)
        self._binds = binds_of_runs(binds)
        self._packages = None if packages is None else host_paths("packages", packages)
        self._max_parallel = parallel_runs(max_parallel)
        self._shares = max_parallel is None
        self._max_waiting = whole_number("max_waiting", max_waiting, 0)
        self._jail: J | None = None
        self._life = _Life(self._max_parallel, self._max_waiting)

    @abstractmethod
    def _candidates(self) -> list[J]:
        """Jails to try, the tightest first. Blocks.

        Raises:
            SandboxUnavailableError: None can work here.
        """

    @abstractmethod
    def _start(self, jail: J, task: JailTask, spawner: Executor) -> JailedProcess:
        """Start a run."""

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
        data, named = encoded("stdin", stdin, limits.stdin_bytes), not isinstance(stdin, NamelessInput)
        life = self._current()
        jail = await self._ready(life)
        slot = await life.slots.acquire()
        try:
            async with cores().hold() if self._shares else contextlib.nullcontext():
                return await self._run_in(life, jail, JailTask(program, data, limits, named))
        finally:
            life.slots.release(slot)

    async def close(self) -> None:
        """Kill what still runs; runs that wait fail. A later run opens the sandbox again."""
        life, self._life = self._current(), _Life(self._max_parallel, self._max_waiting)
        life.closed = True
        running = tuple(life.running)
        for process in running:
            process.stop(ExitReason.KILLED)
        await asyncio.gather(*(process.wait() for process in running), return_exceptions=True)
        life.spawner.shutdown()

    def _current(self) -> _Life:
        if self._life.owner != os.getpid():  # a fork of the owner: threads and jails are the parent's
            self._life = _Life(self._max_parallel, self._max_waiting)
        return self._life

    async def isolation(self) -> list[str]:
        """What stands between programs and the host, in sentences.

        Raises:
            SandboxUnavailableError: No isolation on this machine.
        """
        described = self._described(await self._ready(self._current()))
        return [*described, MEMORY_PER_PROCESS, CPU_AS_FAR_AS_SEEN]

    async def _ready(self, life: _Life) -> J:
        """The jail, after one real run has shown that it works here."""
        if self._jail is None:
            door = await life.door.acquire()
            try:
                if self._jail is None:
                    self._jail = await self._probed(life)
            finally:
                life.door.release(door)
        return self._jail

    async def _probed(self, life: _Life) -> J:
        candidates = await asyncio.to_thread(self._candidates)
        trouble = ""
        for jail in candidates:
            try:
                result = await self._run_in(life, jail, _PROBE_TASK)
            except SandboxError as error:
                life.check_open()
                trouble = trouble or str(error)
                continue
            if result.stdout == "True True\n":
                return jail
            life.check_open()
            trouble = trouble or f"the trial run printed {result.stdout!r} {result.stderr!r}"
        raise SandboxUnavailableError(
            f"{self.name} cannot isolate programs here: {user_namespace_advice(trouble)}"
        )

    async def _run_in(self, life: _Life, jail: J, task: JailTask) -> RunResult:
        life.check_open()
        try:
            process = self._start(jail, task, life.spawner)
            life.running.add(process)
            try:
                return outcome(await process.wait(), task.limits)
            finally:
                life.running.discard(process)
        except OSError as error:
            raise SandboxError(f"{self.name} could not be started: {error}") from error


@cache
def _launcher() -> str:
    here = Path(__file__).parent
    texts = [
        path.read_text(encoding="utf-8") for path in (here / "inside" / "harden.py", here / "launcher.py")
    ]
    return "\n".join(texts)


def launch(
    python: Interpreter, limits: SandboxLimits, rules: bytes = b"", code: str = "", stderr: str = ""
) -> list[str]:
    """The command that runs inside a jail: the launcher, which starts the program at its usual place.

    Args:
        rules: Seccomp filter that the launcher installs, where the jail does not.
        code: Descriptor of the program, where the jail does not put it into its place.
        stderr: Descriptor that becomes the program's stderr, where the jail writes to its own.
    """
    bounds = ",".join(f"{name}={soft}={hard}" for name, (soft, hard) in kernel_limits(limits).items())
    return [
        *(python.binary, "-s", "-S", "-B", "-X", "utf8", "-c", _launcher()),
        *("{report}", PROGRAM, bounds, ":".join(python.imports), ":".join(DEVICES), rules.hex()),
        *(code, stderr),
    ]
