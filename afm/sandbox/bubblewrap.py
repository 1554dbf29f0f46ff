"""The sandbox that starts one bubblewrap jail for each run.

What a program inside sees: its own user, process, network, IPC, UTS and cgroup namespaces, process ids
from 1 on, no network device, the files of its Python read-only, a private ``/tmp`` of bounded size, a
nearly empty environment, no capabilities, and a kernel without the calls of :mod:`afm.sandbox.seccomp`.
There is no ``/proc``: it tells about the host, and it would let a program reach into the launcher, which
reports the program's end.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from concurrent.futures import Executor
from dataclasses import dataclass

from afm.errors import SandboxUnavailableError
from afm.sandbox.base import SandboxLimits
from afm.sandbox.capture import memory_file
from afm.sandbox.interpreter import Identity, Interpreter, check_readable, find_interpreter
from afm.sandbox.percall import JailTask, PerCallSandbox, launch
from afm.sandbox.policy import (
    DEVICES,
    ENVIRONMENT,
    NO_ISOLATION,
    PROGRAM,
)
from afm.sandbox.process import JailedProcess
from afm.sandbox.seccomp import filter_program


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


class BubblewrapSandbox(PerCallSandbox[_Jail]):
    """Runs each program in a fresh bubblewrap jail; see :class:`afm.sandbox.percall.PerCallSandbox`."""

    name = "bubblewrap"

    def _candidates(self) -> list[_Jail]:
        path = find_bubblewrap("--as-pid-1", "--size", "--seccomp", "--clearenv")
        identity = Identity.for_process()
        interpreter = find_interpreter(self._python, identity, self._packages)
        check_readable("binds", self._binds, identity)
        rules = filter_program()
        known = _help_text(path)
        variants: list[tuple[str, ...]] = [("--disable-userns",), ()] if "--disable-userns" in known else [()]
        return [
            _Jail(path, identity, interpreter, _options(interpreter, variant, self._binds), rules)
            for variant in variants
        ]

    def _described(self, jail: _Jail) -> list[str]:
        return [
            f"bubblewrap ({jail.bubblewrap}) for each run, {self._max_parallel} at a time",
            f"Python {'.'.join(map(str, jail.python.version))} ({jail.python.binary})",
        ]

    def _start(self, jail: _Jail, task: JailTask, spawner: Executor) -> JailedProcess:
        files = contextlib.ExitStack()
        try:
            code_fd = memory_file("program", task.program, files.callback)
            rules_fd = memory_file("rules", jail.system_calls, files.callback)
            stdin_fd = memory_file("stdin", task.stdin, files.callback)
            copy_fd = memory_file("stdin", task.device, files.callback)
            return JailedProcess(
                _command(jail, task.limits, _Descriptors(code_fd, rules_fd, copy_fd)),
                stdin=stdin_fd,
                inherited=(code_fd, rules_fd, copy_fd),
                files=files,
                identity=jail.identity,
                limits=task.limits,
                spawner=spawner,
            )
        except BaseException:
            files.close()
            raise


def find_bubblewrap(*needed: str) -> str:
    """Path of bubblewrap.

    Raises:
        SandboxUnavailableError: It is not installed, or too old to know the flags ``needed``.
    """
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxUnavailableError(
            f"bubblewrap is not installed; {NO_ISOLATION}: apt-get install bubblewrap"
        )
    known = _help_text(path)
    if missing := [flag for flag in needed if flag not in known]:
        raise SandboxUnavailableError(
            f"{path} is too old, it lacks {', '.join(missing)}; {NO_ISOLATION}: install bubblewrap 0.7 or newer"
        )
    return path


def _help_text(path: str) -> str:
    return subprocess.run([path, "--help"], capture_output=True, text=True, timeout=30, check=False).stdout


def _options(python: Interpreter, variant: tuple[str, ...], binds: tuple[str, ...]) -> tuple[str, ...]:
    """Bubblewrap's arguments that do not depend on the run."""
    options = [
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--as-pid-1", "--die-with-parent", "--new-session"),
        *("--hostname", "sandbox", "--cap-drop", "ALL", "--clearenv"),
    ]
    for name, value in ENVIRONMENT.items():
        options += ("--setenv", name, value)
    for path in (*python.binds, *binds):
        options += ("--ro-bind", path, path)
    for path, inside in python.packages:
        options += ("--ro-bind", path, inside)
    for name, target in python.links:
        options += ("--symlink", target, name)
    for device in DEVICES:
        options += ("--dev-bind", device, device)
    return (*options, *variant)


def _command(jail: _Jail, limits: SandboxLimits, files: _Descriptors) -> list[str]:
    size = str(limits.file_bytes)
    return [
        *(jail.bubblewrap, *jail.options),
        *("--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/dev/shm"),
        *("--perms", "0444", "--file", str(files.code), PROGRAM),
        *("--perms", "0444", "--file", str(files.stdin), "/dev/stdin"),
        *("--chdir", "/tmp", "--remount-ro", "/"),
        *("--seccomp", str(files.rules), "--info-fd", "{info}"),
        *("--", *launch(jail.python, limits)),
    ]
