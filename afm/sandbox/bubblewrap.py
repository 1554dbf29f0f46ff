"""The sandbox that starts one bubblewrap jail for each run.

A program inside has its own user, process, network, IPC, UTS and cgroup namespaces. Its process ids start at 1. It has
no network device, no capabilities and a nearly empty environment. It sees the files of its Python read-only, and a
private ``/tmp`` of bounded size. The kernel refuses the calls of :mod:`afm.sandbox.seccomp`. There is no ``/proc``,
because it describes the host and would let a program reach into the launcher, which reports the program's end.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from afm.errors import SandboxUnavailableError
from afm.sandbox.base import DEVICES, ENVIRONMENT, NO_ISOLATION, PROGRAM
from afm.sandbox.interpreter import Identity, Interpreter, find_interpreter
from afm.sandbox.percall import Jail, PerCallSandbox, launch
from afm.sandbox.run import RunTask, memory_file
from afm.sandbox.seccomp import filter_program


@dataclass(frozen=True, slots=True)
class BubblewrapJail(Jail):
    """A jail that bubblewrap makes.

    Attributes:
        options: Arguments that do not depend on the run.
    """

    options: tuple[str, ...]


class BubblewrapSandbox(PerCallSandbox[BubblewrapJail]):
    """Runs each program in a fresh bubblewrap jail."""

    name = "bubblewrap"

    def _candidates(self) -> list[BubblewrapJail]:
        path = find_bubblewrap("--as-pid-1", "--size", "--seccomp", "--clearenv")
        identity = Identity.for_process()
        python = find_interpreter(self._settings, identity)
        options = (*namespace_options(), *shown_files(python, self._settings.binds))
        variants: list[tuple[str, ...]] = [()]
        if "--disable-userns" in _help_text(path):
            variants.insert(0, ("--disable-userns",))
        return [
            BubblewrapJail(path, identity, python, filter_program(), (*options, *variant))
            for variant in variants
        ]

    def _command(
        self, jail: BubblewrapJail, task: RunTask, files: contextlib.ExitStack
    ) -> tuple[list[str], tuple[int, ...]]:
        device = task.stdin if task.stdin_named else b""
        code, rules, stdin = (memory_file(data, files) for data in (task.program, jail.system_calls, device))
        size = str(task.limits.file_bytes)
        command = [
            *(jail.path, *jail.options),
            *("--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/dev/shm"),
            *("--perms", "0444", "--file", str(code), PROGRAM),
            *("--perms", "0444", "--file", str(stdin), "/dev/stdin"),
            *("--chdir", "/tmp", "--remount-ro", "/"),
            *("--seccomp", str(rules), "--info-fd", "{info}"),
            *("--", *launch(jail, task.limits)),
        ]
        return command, (code, rules, stdin)


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


def namespace_options() -> list[str]:
    """Bubblewrap's arguments for namespaces of its own and a nearly empty environment."""
    options = [
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--as-pid-1", "--die-with-parent", "--new-session"),
        *("--hostname", "sandbox", "--cap-drop", "ALL", "--clearenv"),
    ]
    for name, value in ENVIRONMENT.items():
        options += ("--setenv", name, value)
    return options


def shown_files(python: Interpreter, binds: Sequence[str], root: str = "") -> list[str]:
    """Bubblewrap's arguments for the files that a program sees, below ``root``."""
    options: list[str] = []
    for path in (*python.binds, *binds):
        options += ("--ro-bind", path, root + path)
    for path, inside in python.packages:
        options += ("--ro-bind", path, root + inside)
    for name, target in python.links:
        options += ("--symlink", target, root + name)
    for device in DEVICES:
        options += ("--dev-bind", device, root + device)
    return options
