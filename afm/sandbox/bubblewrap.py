"""The sandbox that starts one bubblewrap jail for each run.

What a program inside sees: its own user, process, network, IPC, UTS and cgroup namespaces, process ids
from 1 on, no network device, the files of its Python read-only, a private ``/tmp`` of bounded size, a
nearly empty environment, no capabilities, and a kernel without the calls of :mod:`afm.sandbox.seccomp`.
There is no ``/proc``: it tells about the host, and it would let a program reach into the launcher, which
reports the program's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

from afm.errors import DataError, SandboxError, SandboxUnavailableError
from afm.sandbox.base import ExitReason, RunResult, SandboxLimits
from afm.sandbox.interpreter import Identity, Interpreter, find_interpreter
from afm.sandbox.outcome import outcome
from afm.sandbox.process import JailedProcess, memory_file
from afm.sandbox.seccomp import filter_program

_PROGRAM = "/tmp/main.py"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program prints the same text
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_PROBE = "import os, socket\nprint(os.getuid() != 0, os.listdir('/tmp') == ['main.py'])"
_PROBE_LIMITS = SandboxLimits(wall_s=30.0)
_INSTALL = "model-written code does not run without isolation"


@dataclass(frozen=True, slots=True)
class _Jail:
    """Everything about a jail that is the same for every run."""

    bubblewrap: str
    identity: Identity
    python: Interpreter
    options: tuple[str, ...]
    system_calls: bytes


@dataclass(frozen=True, slots=True)
class _Descriptors:
    """What bubblewrap reads: the program, the seccomp rules, a copy of stdin for ``/dev/stdin``."""

    code: int
    rules: int
    stdin: int


@dataclass(frozen=True, slots=True)
class _Gate:
    slots: asyncio.Semaphore
    opening: asyncio.Lock


class BubblewrapSandbox:
    """Runs each program in a fresh bubblewrap jail.

    Args:
        python: The sandbox's Python; ``/usr/bin/python3`` when ``None``. The unprivileged user must be
            able to read it, so not one below a home directory.
        limits: Bounds of a run that names none.
        max_parallel: Runs at the same time, further ones wait; the number of cores when ``None``.
        binds: Further host paths that programs may read.
    """

    def __init__(
        self,
        *,
        python: str | None = None,
        limits: SandboxLimits | None = None,
        max_parallel: int | None = None,
        binds: tuple[str, ...] = (),
    ) -> None:
        self._python = python
        self._limits = limits or SandboxLimits()
        self._binds = tuple(binds)
        self._max_parallel = max_parallel or len(os.sched_getaffinity(0))
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, _Gate] = WeakKeyDictionary()
        self._jail: _Jail | None = None
        self._running: set[JailedProcess] = set()
        self._spawner = _spawner()

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        """See :class:`afm.sandbox.base.Sandbox`.

        Raises:
            DataError: ``code`` or ``stdin`` is larger than the limits allow.
        """
        limits = limits or self._limits
        program = _encoded("the program", code, limits.file_bytes)
        given = _encoded("stdin", stdin, limits.stdin_bytes)
        jail = await self._ready()
        async with self._gate().slots:
            return await self._run_in(jail, program, given, limits)

    async def close(self) -> None:
        """Kill what still runs."""
        running = tuple(self._running)
        for process in running:
            process.stop(ExitReason.KILLED)
        await asyncio.gather(*(process.wait() for process in running), return_exceptions=True)
        self._spawner.shutdown()
        self._spawner = _spawner()

    def _gate(self) -> _Gate:
        """The gate of this event loop: locks belong to one loop, a sandbox may serve several in turn."""
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            self._gates[loop] = _Gate(asyncio.Semaphore(self._max_parallel), asyncio.Lock())
        return self._gates[loop]

    async def _ready(self) -> _Jail:
        """The jail, after one real run has shown that it works here."""
        if self._jail is None:
            async with self._gate().opening:
                if self._jail is None:
                    self._jail = await self._probed()
        return self._jail

    async def _probed(self) -> _Jail:
        candidates = await asyncio.to_thread(_candidates, self._python, self._binds)
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
        raise SandboxUnavailableError(f"bubblewrap cannot isolate programs here: {_explained(trouble)}")

    async def _run_in(self, jail: _Jail, program: bytes, stdin: bytes, limits: SandboxLimits) -> RunResult:
        try:
            process = self._start(jail, program, stdin, limits)
            self._running.add(process)
            try:
                return outcome(await process.wait(), limits)
            finally:
                self._running.discard(process)
        except OSError as error:
            raise SandboxError(f"{jail.bubblewrap} could not be started: {error}") from error

    def _start(self, jail: _Jail, program: bytes, stdin: bytes, limits: SandboxLimits) -> JailedProcess:
        files = contextlib.ExitStack()
        try:
            code_fd = memory_file("program", program, files.callback)
            rules_fd = memory_file("rules", jail.system_calls, files.callback)
            stdin_fd = memory_file("stdin", stdin, files.callback)
            copy_fd = memory_file("stdin", stdin, files.callback)
            return JailedProcess(
                _command(jail, limits, _Descriptors(code_fd, rules_fd, copy_fd)),
                stdin=stdin_fd,
                inherited=(code_fd, rules_fd, copy_fd),
                files=files,
                identity=jail.identity,
                output_bytes=limits.output_bytes,
                wall_s=limits.wall_s,
                spawner=self._spawner,
            )
        except BaseException:
            files.close()
            raise


def _spawner() -> ThreadPoolExecutor:
    # Threads start with the first run. A jail dies with the thread that started it, so they are our own.
    return ThreadPoolExecutor(max_workers=2, thread_name_prefix="sandbox")


def _candidates(python: str | None, binds: tuple[str, ...]) -> list[_Jail]:
    """Jails to try, the tightest first."""
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxUnavailableError(f"bubblewrap is not installed; {_INSTALL}: apt-get install bubblewrap")
    identity = Identity.for_process()
    interpreter = find_interpreter(python, identity)
    known = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=30, check=False).stdout
    if missing := [flag for flag in ("--as-pid-1", "--size", "--seccomp", "--clearenv") if flag not in known]:
        raise SandboxUnavailableError(
            f"{path} is too old, it lacks {', '.join(missing)}; {_INSTALL}: install bubblewrap 0.7 or newer"
        )
    rules = filter_program()
    variants: list[tuple[str, ...]] = [("--disable-userns",), ()] if "--disable-userns" in known else [()]
    return [
        _Jail(path, identity, interpreter, _options(interpreter, variant, binds), rules)
        for variant in variants
    ]


def _options(python: Interpreter, variant: tuple[str, ...], binds: tuple[str, ...]) -> tuple[str, ...]:
    """Bubblewrap's arguments that do not depend on the run."""
    options = [
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--as-pid-1", "--die-with-parent", "--new-session"),
        *("--hostname", "sandbox", "--cap-drop", "ALL", "--clearenv"),
    ]
    for name, value in _ENVIRONMENT.items():
        options += ("--setenv", name, value)
    for path in (*python.binds, *binds):
        options += ("--ro-bind", path, path)
    for name, target in python.links:
        options += ("--symlink", target, name)
    for device in _DEVICES:
        options += ("--dev-bind", device, device)
    return (*options, *variant)


@cache
def _launcher() -> str:
    return Path(__file__).with_name("launcher.py").read_text(encoding="utf-8")


def _command(jail: _Jail, limits: SandboxLimits, files: _Descriptors) -> list[str]:
    size = str(limits.file_bytes)
    bounds = {
        "AS": limits.memory_bytes,
        "CPU": limits.cpu_s,
        "FSIZE": limits.file_bytes,
        "NOFILE": limits.open_files,
        "NPROC": limits.processes + 1,  # the launcher counts too
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "SIGPENDING": 64,
    }
    return [
        *(jail.bubblewrap, *jail.options),
        *("--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/dev/shm"),
        *("--perms", "0444", "--file", str(files.code), _PROGRAM),
        *("--perms", "0444", "--file", str(files.stdin), "/dev/stdin"),
        *("--chdir", "/tmp", "--remount-ro", "/"),
        *("--seccomp", str(files.rules), "--info-fd", "{info}"),
        *("--", jail.python.binary, "-s", "-S", "-B", "-X", "utf8", "-c", _launcher(), "{report}"),
        *(_PROGRAM, ",".join(f"{name}={value}={value + (name == 'CPU')}" for name, value in bounds.items())),
        ":".join(jail.python.imports),
    ]


def _encoded(what: str, text: str, limit: int) -> bytes:
    data = text.encode("utf-8", "replace")
    if len(data) > limit:
        raise DataError(f"{what} is {len(data)} bytes long, expected at most {limit}")
    return data


def _explained(trouble: str) -> str:
    """The trouble in bubblewrap's words, and what to do about it."""
    advice = {
        "seccomp": "the kernel lacks seccomp filters (CONFIG_SECCOMP_FILTER)",
        "namespace": "the kernel forbids user namespaces; set kernel.unprivileged_userns_clone=1, "
        "user.max_user_namespaces above 0 and kernel.apparmor_restrict_unprivileged_userns=0, or in Docker "
        "--security-opt seccomp=unconfined",
        "uid map": "the kernel forbids user namespaces to this user (AppArmor: "
        "kernel.apparmor_restrict_unprivileged_userns=0)",
    }
    hints = [text for words, text in advice.items() if words in trouble.lower()]
    return "; ".join([trouble, *hints[:1], _INSTALL])
