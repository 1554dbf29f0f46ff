"""The common part of the sandboxes that start a jail for each run, and the process of a jail."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from afm.errors import SandboxError, SandboxUnavailableError
from afm.sandbox.base import (
    CPU_AS_FAR_AS_SEEN,
    DEVICES,
    MEMORY_PER_PROCESS,
    PROGRAM,
    ExitReason,
    RunResult,
    SandboxLimits,
    SandboxSettings,
    kernel_limits,
)
from afm.sandbox.interpreter import Identity, Interpreter
from afm.sandbox.run import JailRun, RunTask, isolation_advice, memory_file, open_pipe, result_of
from afm.sandbox.slots import Slots, hold_core, own_cores

_GRACE_S = 1.0
_START_S = 60.0
_PROBE = RunTask(
    b"import os\nprint(os.getuid() != 0, os.listdir('/tmp') == ['main.py'])", b"", SandboxLimits(wall_s=30.0)
)


class JailedProcess(JailRun):
    """Starts a jail and follows it to its end.

    Args:
        command: Program and arguments. The words ``{report}``, ``{info}`` and ``{stderr}`` become the descriptors for
            the launcher's report, bubblewrap's information and the program's errors. With ``{stderr}``, the jail's own
            errors appear only if the program does not start.
        stdin: Content of the program's standard input.
        inherited: Further descriptors that the jail keeps open.
        files: Closes ``inherited`` once the jail has its own copies.
        spawner: Starts the process. Its threads must outlive the jail, which dies with its parent thread.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: bytes,
        inherited: Sequence[int],
        files: contextlib.ExitStack,
        identity: Identity,
        limits: SandboxLimits,
        spawner: Executor,
    ) -> None:
        super().__init__(limits)
        self._informed = "{info}" in command
        self._inside: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        stdin_fd = memory_file(stdin, files)
        out_end, err_end, report_end = self._open_pipes(files)
        self._info, info_end = open_pipe(self._fds, files)
        numbers = {"{report}": str(report_end), "{info}": str(info_end), "{stderr}": str(err_end)}
        self._messages = os.memfd_create("messages", os.MFD_CLOEXEC)
        self._fds.callback(os.close, self._messages)
        own_err = self._messages if "{stderr}" in command else err_end

        def start() -> subprocess.Popen[bytes]:
            with files:
                return subprocess.Popen(
                    [numbers.get(word, word) for word in command],
                    stdin=stdin_fd,
                    stdout=out_end,
                    stderr=own_err,
                    pass_fds=(*inherited, report_end, info_end, err_end),
                    cwd="/",
                    env={},
                    start_new_session=True,
                    **identity.popen_arguments(),
                )

        # In a thread, because it waits until the kernel has loaded the program.
        self._loop.run_in_executor(spawner, start).add_done_callback(self._spawned)

    def _spawned(self, spawning: asyncio.Future[subprocess.Popen[bytes]]) -> None:
        if (error := spawning.exception()) is not None:
            self._release()
            self._ended.set_exception(error)
            return
        self._process = spawning.result()
        self._after(_START_S, self.stop, ExitReason.TIMEOUT)
        self._watch_pipes()
        self._watch_process(os.pidfd_open(self._process.pid))

    def _kill(self) -> None:
        # Every descendant dies with process 1 of the jail, which bubblewrap then reaps.
        # Until process 1 exists, everything is in bubblewrap's process group.
        inside = self._first_process()
        if inside is None:
            self._kill_group()
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(inside, signal.SIGKILL)
        self._after(_GRACE_S, self._kill_group)

    def _first_process(self) -> int | None:
        """Return process 1 of the jail once it is known."""
        if self._inside is None:
            self._inside = self._child_from_info() if self._informed else self._first_child()
        return self._inside

    def _child_from_info(self) -> int | None:
        try:
            info = os.read(self._info, 4096)
        except BlockingIOError:
            return None
        match = re.search(rb'"child-pid": (\d+)', info)
        return int(match[1]) if match else None

    def _first_child(self) -> int | None:
        """Return process 1 of a jail that does not report it: the only child of the started process."""
        assert self._process is not None
        pid = str(self._process.pid)
        try:
            children = Path("/proc", pid, "task", pid, "children").read_text(encoding="ascii").split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def _kill_group(self) -> None:
        if self._process is not None and not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _finish(self) -> None:
        assert self._process is not None
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return
        self._process.returncode = os.waitstatus_to_exitcode(status)
        report = self._read_rest()
        if not report:
            self._stderr.data += os.pread(self._messages, 4096, 0)
        self._conclude(report, usage.ru_utime + usage.ru_stime)


@dataclass(frozen=True, slots=True)
class Jail:
    """The properties of a jail that every run shares.

    Attributes:
        path: The binary that makes the jail.
        system_calls: The seccomp filter.
    """

    path: str
    identity: Identity
    python: Interpreter
    system_calls: bytes


J = TypeVar("J", bound=Jail)


class _Life:
    """The state of a sandbox from its opening to its close. A run stays with the one in which it began."""

    def __init__(self, max_parallel: int, max_waiting: int) -> None:
        self.owner = os.getpid()
        self.closed = False
        self.door = Slots(("the door",), max_waiting)
        self.slots = Slots(range(max_parallel), max_waiting)
        self.running: set[JailedProcess] = set()
        # Threads start with the first run. They belong to the sandbox because a jail dies with its parent thread.
        self.spawner = ThreadPoolExecutor(max_workers=2, thread_name_prefix="sandbox")

    def check_open(self) -> None:
        if self.closed:
            raise SandboxError("the sandbox was closed while the run waited for its turn")


class PerCallSandbox(ABC, Generic[J]):
    """Runs each program in a fresh jail. ``J`` holds the properties that all its jails share."""

    name: str

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._max_parallel = settings.max_parallel or own_cores()
        self._jail: J | None = None
        self._life = self._new_life()

    def _new_life(self) -> _Life:
        return _Life(self._max_parallel, self._settings.max_waiting)

    @abstractmethod
    def _candidates(self) -> list[J]:
        """Return the jails to try, the strictest first. Blocks.

        Raises:
            SandboxUnavailableError: No jail can work here.
        """

    @abstractmethod
    def _command(
        self, jail: J, task: RunTask, files: contextlib.ExitStack
    ) -> tuple[list[str], tuple[int, ...]]:
        """Return the command that runs a program, for :class:`JailedProcess`, and the descriptors that it inherits.

        Args:
            files: Closes the descriptors.
        """

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        """See :class:`afm.sandbox.base.Sandbox`."""
        task = RunTask.from_texts(code, stdin, limits or self._settings.limits)
        life = self._current()
        jail = await self._ready(life)
        slot = await life.slots.acquire()
        try:
            async with hold_core(self._settings.max_parallel):
                return await self._run_in(life, jail, task)
        finally:
            life.slots.release(slot)

    async def close(self) -> None:
        """Kill all running programs. Waiting runs fail, and a later run opens the sandbox again."""
        life, self._life = self._current(), self._new_life()
        life.closed = True
        running = tuple(life.running)
        for process in running:
            process.stop(ExitReason.KILLED)
        await asyncio.gather(*(process.wait() for process in running), return_exceptions=True)
        life.spawner.shutdown()

    def _current(self) -> _Life:
        if self._life.owner != os.getpid():  # in a fork, the threads and jails belong to the parent
            self._life = self._new_life()
        return self._life

    async def isolation(self) -> list[str]:
        """See :class:`afm.sandbox.base.LocalSandbox`."""
        jail = await self._ready(self._current())
        return [
            f"{self.name} ({jail.path}), one jail per run, {self._max_parallel} runs at a time",
            str(jail.python),
            MEMORY_PER_PROCESS,
            CPU_AS_FAR_AS_SEEN,
        ]

    async def _ready(self, life: _Life) -> J:
        """Return the jail after a real run has shown that it works here."""
        if self._jail is None:
            door = await life.door.acquire()
            try:
                if self._jail is None:
                    self._jail = await self._find_jail(life)
            finally:
                life.door.release(door)
        return self._jail

    async def _find_jail(self, life: _Life) -> J:
        candidates = await asyncio.to_thread(self._candidates)
        trouble = ""
        for jail in candidates:
            try:
                result = await self._run_in(life, jail, _PROBE)
            except SandboxError as error:
                life.check_open()
                trouble = trouble or str(error)
                continue
            if result.stdout == "True True\n":
                return jail
            life.check_open()
            trouble = trouble or f"the trial run printed {result.stdout!r} {result.stderr!r}"
        raise SandboxUnavailableError(
            f"{self.name} cannot isolate programs here: {isolation_advice(trouble)}"
        )

    async def _run_in(self, life: _Life, jail: J, task: RunTask) -> RunResult:
        life.check_open()
        try:
            process = self._start(jail, task, life.spawner)
            life.running.add(process)
            try:
                return result_of(await process.wait(), task.limits)
            finally:
                life.running.discard(process)
        except OSError as error:
            raise SandboxError(f"{self.name} could not be started: {error}") from error

    def _start(self, jail: J, task: RunTask, spawner: Executor) -> JailedProcess:
        files = contextlib.ExitStack()
        try:
            command, inherited = self._command(jail, task, files)
            return JailedProcess(
                command,
                stdin=task.stdin,
                inherited=inherited,
                files=files,
                identity=jail.identity,
                limits=task.limits,
                spawner=spawner,
            )
        except BaseException:
            files.close()
            raise


@cache
def _launcher() -> str:
    inside = Path(__file__).with_name("inside")
    return "\n".join((inside / name).read_text(encoding="utf-8") for name in ("harden.py", "launcher.py"))


def launch(
    jail: Jail, limits: SandboxLimits, *, rules: bytes = b"", code: str = "", stderr: str = ""
) -> list[str]:
    """Return the command to run inside a jail: the launcher, which starts the program from ``PROGRAM``.

    Args:
        rules: Seccomp filter for the launcher to install, if the jail does not install it.
        code: Descriptor of the program, if the jail does not write it to ``PROGRAM``.
        stderr: Descriptor that becomes the program's stderr, if the jail writes to its own.
    """
    bounds = ",".join(f"{name}={soft}={hard}" for name, (soft, hard) in kernel_limits(limits).items())
    return [
        *(jail.python.binary, "-s", "-S", "-B", "-X", "utf8", "-c", _launcher()),
        *("{report}", PROGRAM, bounds, ":".join(jail.python.imports), ":".join(DEVICES), rules.hex()),
        *(code, stderr),
    ]
