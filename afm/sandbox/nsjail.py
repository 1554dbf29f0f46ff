"""The sandbox that starts one nsjail for each run, with the same policy as the others.

Written for nsjail 3.4; ``requirements/install-nsjail.sh`` installs one. The system-call filter and the limits are our
own and set by the launcher: nsjail's would count in megabytes. Nothing of a run is written to the host's disk: program
and mounts are anonymous files, so that an owner that is killed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from afm.errors import SandboxUnavailableError
from afm.sandbox.base import SandboxLimits
from afm.sandbox.capture import memory_file
from afm.sandbox.interpreter import Identity, Interpreter, check_readable, find_interpreter
from afm.sandbox.percall import JailTask, PerCallSandbox, launch
from afm.sandbox.policy import DEVICES, ENVIRONMENT, INODES, NO_ISOLATION
from afm.sandbox.process import JailedProcess
from afm.sandbox.seccomp import filter_program

_NEEDED = (
    *("--disable_proc", "--disable_rlimits", "--iface_no_lo", "--pass_fd", "--quiet"),
    *("--config", "--hostname", "--time_limit"),
)
_SAFE = {"nosuid": True, "nodev": True}
_ESCAPES = {byte: f"\\{byte:03o}" for byte in range(256) if not 32 <= byte < 127 or chr(byte) in '"\\'}
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
                f"nsjail was not found ({where}); {NO_ISOLATION}: requirements/install-nsjail.sh, or build "
                "https://github.com/google/nsjail and name it with nsjail_path, or use the backend 'zygote'"
            )
        asked = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=30, check=False)
        known = asked.stdout + asked.stderr
        if missing := [flag for flag in _NEEDED if flag not in known]:
            raise SandboxUnavailableError(
                f"{path} does not know {', '.join(missing)}; {NO_ISOLATION}: install nsjail 3.4 or newer"
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

    def _start(self, jail: NsjailJail, task: JailTask, spawner: Executor) -> JailedProcess:
        files = contextlib.ExitStack()
        try:
            code = memory_file("program", task.program, files.callback)
            config = memory_file(
                "config", nsjail_config(jail, task.limits, task.device).encode(), files.callback
            )
            return JailedProcess(
                nsjail_command(jail, task.limits, code=code, config=config),
                stdin=memory_file("stdin", task.stdin, files.callback),
                inherited=(code, config),
                files=files,
                identity=jail.identity,
                limits=task.limits,
                spawner=spawner,
            )
        except BaseException:
            files.close()
            raise


def nsjail_command(jail: NsjailJail, limits: SandboxLimits, *, code: int, config: int) -> Sequence[str]:
    """The command line of a run.

    Args:
        code: Descriptor of the program.
        config: Descriptor of what :func:`nsjail_config` gave.
    """
    uid = os.getuid() if jail.identity.uid is None else jail.identity.uid
    gid = os.getgid() if jail.identity.gid is None else jail.identity.gid
    words = [
        *(*jail.tied, jail.nsjail, "--config", f"/proc/self/fd/{config}", "--mode", "o", "--quiet"),
        *("--user", str(uid), "--group", str(gid), "--hostname", "sandbox", "--cwd", "/tmp"),
        *("--time_limit", str(int(limits.wall_s) + _SPARE_S)),
        *("--disable_proc", "--disable_rlimits", "--iface_no_lo"),
        *("--pass_fd", "{report}", "--pass_fd", "{stderr}", "--pass_fd", str(code)),
    ]
    if jail.nice:
        words += ("--nice_level", str(os.getpriority(os.PRIO_PROCESS, 0)))
    for name, value in ENVIRONMENT.items():
        words += ("--env", f"{name}={value}")
    words += ("--env", "PWD=/tmp")
    return [*words, "--", *launch(jail.python, limits, jail.system_calls, code=str(code), stderr="{stderr}")]


def nsjail_config(jail: NsjailJail, limits: SandboxLimits, stdin: bytes) -> str:
    """The mounts of a run, as nsjail's configuration file: its options would leave out ``nosuid``.

    Args:
        stdin: Content of ``/dev/stdin``.
    """
    space = f"size={limits.file_bytes},nr_inodes={INODES},mode=0755"
    mounts = [
        _mount(dst="/", fstype="tmpfs", **_SAFE),  # above nsjail's own, which allows setuid
        *(_bind(path, path) for path in (*jail.python.binds, *jail.binds)),
        *(_bind(path, path, nodev=False) for path in DEVICES),
        *(_bind(path, inside) for path, inside in jail.python.packages),
        *(_mount(src=target, dst=name, is_symlink=True) for name, target in jail.python.links),
        *(_mount(dst=at, fstype="tmpfs", options=space, rw=True, **_SAFE) for at in ("/tmp", "/dev/shm")),
    ]
    if stdin:
        mounts.append(_mount(src_content=stdin, dst="/dev/stdin", **_SAFE))
    else:  # nsjail makes no empty files
        mounts.append(_bind("/dev/null", "/dev/stdin", nodev=False))
    return "\n".join(mounts)


def _bind(path: str, inside: str, *, nodev: bool = True) -> str:
    return _mount(src=path, dst=inside, is_bind=True, nosuid=True, nodev=nodev)


def _mount(**fields: str | bytes | bool) -> str:
    """One ``mount`` in protobuf's text format."""
    words = [
        f"{name}: {str(value).lower()}" if isinstance(value, bool) else f'{name}: "{_escaped(value)}"'
        for name, value in fields.items()
    ]
    return f"mount {{ {' '.join(words)} }}"


def _escaped(value: str | bytes) -> str:
    data = value if isinstance(value, bytes) else os.fsencode(value)
    return data.decode("latin-1").translate(_ESCAPES)
