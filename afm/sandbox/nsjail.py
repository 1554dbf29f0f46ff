"""The sandbox that starts one nsjail for each run, with the same policy as the others.

Written for the command line of nsjail 3.1 and newer. No distribution packages nsjail: it is built from source.
The system-call filter and the limits are our own and set by the launcher: nsjail's would count in megabytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.errors import SandboxUnavailableError
from afm.sandbox.base import SandboxLimits
from afm.sandbox.capture import memory_file
from afm.sandbox.interpreter import Identity, Interpreter, check_readable, find_interpreter
from afm.sandbox.percall import PerCallSandbox, Task, launch
from afm.sandbox.policy import DEVICES, ENVIRONMENT, INODES, NO_ISOLATION, PROGRAM
from afm.sandbox.process import JailedProcess
from afm.sandbox.seccomp import filter_program

_NEEDED = (
    *("--disable_proc", "--disable_rlimits", "--iface_no_lo", "--pass_fd", "--really_quiet"),
    *("--bindmount_ro", "--symlink", "--mount", "--hostname", "--time_limit"),
)
_SPARE_S = 90  # nsjail's own time limit is only for the case that nobody is left to stop the run


@dataclass(frozen=True, slots=True)
class NsjailJail:
    """Everything about a jail that is the same for every run.

    Attributes:
        tied: Words before nsjail's own that let it end with the process that started it.
        nice: Whether this nsjail would otherwise lower the program's priority.
    """

    nsjail: str
    identity: Identity
    python: Interpreter
    binds: tuple[str, ...]
    system_calls: bytes
    tied: tuple[str, ...] = ()
    nice: bool = True


class NsjailSandbox(PerCallSandbox[NsjailJail]):
    """Runs each program in a fresh nsjail; see :class:`afm.sandbox.percall.PerCallSandbox`.

    Args:
        nsjail_path: The binary; looked up in ``PATH`` when ``None``.
        options: Arguments of ``PerCallSandbox``.
    """

    name = "nsjail"

    def __init__(self, *, nsjail_path: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._path = nsjail_path

    def _candidates(self) -> list[NsjailJail]:
        path = shutil.which(self._path or "nsjail")
        if path is None:
            where = self._path or "PATH"
            raise SandboxUnavailableError(
                f"nsjail was not found ({where}); {NO_ISOLATION}: build it from "
                "https://github.com/google/nsjail and name it with nsjail_path, or use the backend 'zygote'"
            )
        asked = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=30, check=False)
        known = asked.stdout + asked.stderr
        if missing := [flag for flag in _NEEDED if flag not in known]:
            raise SandboxUnavailableError(
                f"{path} does not know {', '.join(missing)}; {NO_ISOLATION}: build nsjail 3.1 or newer"
            )
        identity = Identity.for_process()
        python = find_interpreter(self._python, identity, self._packages)
        check_readable("binds", self._binds, identity)
        setpriv = shutil.which("setpriv")
        tied = (setpriv, "--pdeathsig", "KILL", "--") if setpriv else ()
        nice = "--nice_level" in known
        return [NsjailJail(path, identity, python, self._binds, filter_program(), tied, nice)]

    def _described(self, jail: NsjailJail) -> list[str]:
        return [
            f"nsjail ({jail.nsjail}) for each run, {self._max_parallel} at a time",
            f"Python {'.'.join(map(str, jail.python.version))} ({jail.python.binary})",
        ]

    def _start(
        self, jail: NsjailJail, task: Task, spawner: Executor, kept: contextlib.ExitStack
    ) -> JailedProcess:
        folder = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="afm-sandbox-")))
        folder.chmod(0o755)
        code = _written(folder / "main.py", task.program)
        given = _written(folder / "stdin", task.stdin)
        files = contextlib.ExitStack()
        try:
            return JailedProcess(
                nsjail_command(jail, task.limits, code=code, stdin=given),
                stdin=memory_file("stdin", task.stdin, files.callback),
                inherited=(),
                files=files,
                identity=jail.identity,
                limits=task.limits,
                spawner=spawner,
            )
        except BaseException:
            files.close()
            raise


def nsjail_command(jail: NsjailJail, limits: SandboxLimits, *, code: Path, stdin: Path) -> Sequence[str]:
    """The command line of a run.

    Args:
        code: Host file of the program.
        stdin: Host file of its standard input, for ``/dev/stdin``.
    """
    uid = os.getuid() if jail.identity.uid is None else jail.identity.uid
    gid = os.getgid() if jail.identity.gid is None else jail.identity.gid
    space = f"size={limits.file_bytes},nr_inodes={INODES},mode=0755"
    words = [
        *(*jail.tied, jail.nsjail, "--mode", "o", "--really_quiet"),
        *("--user", str(uid), "--group", str(gid), "--hostname", "sandbox", "--cwd", "/tmp"),
        *("--time_limit", str(int(limits.wall_s) + _SPARE_S)),
        *("--disable_proc", "--disable_rlimits", "--iface_no_lo", "--pass_fd", "{report}"),
    ]
    if jail.nice:
        words += ("--nice_level", str(os.getpriority(os.PRIO_PROCESS, 0)))
    for name, value in ENVIRONMENT.items():
        words += ("--env", f"{name}={value}")
    words += ("--env", "PWD=/tmp")
    for path in (*jail.python.binds, *jail.binds, *DEVICES):
        words += ("--bindmount_ro", path)
    for path, inside in jail.python.packages:
        words += ("--bindmount_ro", f"{path}:{inside}")
    for name, target in jail.python.links:
        words += ("--symlink", f"{target}:{name}")
    words += ("--mount", f"none:/tmp:tmpfs:{space}", "--mount", f"none:/dev/shm:tmpfs:{space}")
    words += ("--bindmount_ro", f"{code}:{PROGRAM}", "--bindmount_ro", f"{stdin}:/dev/stdin")
    return [*words, "--", *launch(jail.python, limits, jail.system_calls)]


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    path.chmod(0o444)
    return path
