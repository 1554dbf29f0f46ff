"""The sandboxes that start one jail per run with bubblewrap or nsjail, under the same policy.

A program inside has its own user, process, network, IPC, UTS and cgroup namespaces. Its process ids start at 1. It has
no network device, no capabilities and a nearly empty environment. It sees the files of its Python read-only, and a
private ``/tmp`` of limited size. The kernel refuses the calls of :mod:`afm.sandbox.seccomp`. There is no ``/proc``,
because it describes the host and would let a program reach into the launcher, which reports the program's end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from afm.errors import SandboxUnavailableError
from afm.sandbox.base import DEVICES, ENVIRONMENT, INODES, NO_ISOLATION, PROGRAM, SandboxLimits
from afm.sandbox.interpreter import Identity, Interpreter, find_interpreter
from afm.sandbox.percall import Jail, PerCallSandbox, launch
from afm.sandbox.run import RunTask, memory_file
from afm.sandbox.seccomp import filter_program

_NEEDED = (
    *("--disable_proc", "--disable_rlimits", "--iface_no_lo", "--pass_fd", "--quiet"),
    *("--config", "--hostname", "--time_limit"),
)
_SAFE = {"nosuid": True, "nodev": True}
_ESCAPES = {byte: f"\\{byte:03o}" for byte in range(256) if not 32 <= byte < 127 or chr(byte) in '"\\'}
_SPARE_S = 90  # nsjail's own time limit only matters if the process that should stop the run is gone


@dataclass(frozen=True, slots=True)
class BubblewrapJail(Jail):
    """A jail made by bubblewrap.

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
            BubblewrapJail(path, identity, python, self._system_calls(), (*options, *variant))
            for variant in variants
        ]

    def _system_calls(self) -> bytes:
        """Return the seccomp filter."""
        return filter_program()

    def _shown(self, files: contextlib.ExitStack) -> tuple[list[str], tuple[int, ...]]:
        """Return further arguments of a run and the descriptors in them."""
        return [], ()

    def _command(
        self, jail: BubblewrapJail, task: RunTask, files: contextlib.ExitStack
    ) -> tuple[list[str], tuple[int, ...]]:
        shown, descriptors = self._shown(files)
        device = task.stdin if task.stdin_named else b""
        code, rules, stdin = (memory_file(data, files) for data in (task.program, jail.system_calls, device))
        size = str(task.limits.file_bytes)
        command = [
            *(jail.path, *jail.options),
            *("--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/dev/shm"),
            *("--perms", "0444", "--file", str(code), PROGRAM),
            *("--perms", "0444", "--file", str(stdin), "/dev/stdin"),
            *shown,
            *("--chdir", "/tmp", "--remount-ro", "/"),
            *("--seccomp", str(rules), "--info-fd", "{info}"),
            *("--", *launch(jail, task.limits)),
        ]
        return command, (code, rules, stdin, *descriptors)


def find_bubblewrap(*needed: str) -> str:
    """Return the path of bubblewrap.

    Raises:
        SandboxUnavailableError: Bubblewrap is not installed, or too old for the flags ``needed``.
    """
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxUnavailableError(
            f"bubblewrap is not installed; {NO_ISOLATION}: apt-get install bubblewrap"
        )
    known = _help_text(path)
    if missing := [flag for flag in needed if flag not in known]:
        raise SandboxUnavailableError(
            f"{path} is too old: it lacks {', '.join(missing)}; {NO_ISOLATION}: install bubblewrap 0.7 or newer"
        )
    return path


def _help_text(path: str) -> str:
    return subprocess.run([path, "--help"], capture_output=True, text=True, timeout=30, check=False).stdout


def namespace_options() -> list[str]:
    """Return bubblewrap's arguments for separate namespaces and a nearly empty environment."""
    options = [
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--as-pid-1", "--die-with-parent", "--new-session"),
        *("--hostname", "sandbox", "--cap-drop", "ALL", "--clearenv"),
    ]
    for name, value in ENVIRONMENT.items():
        options += ("--setenv", name, value)
    return options


def shown_files(python: Interpreter, binds: Sequence[str], root: str = "") -> list[str]:
    """Return bubblewrap's arguments for the files that a program sees below ``root``."""
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


@dataclass(frozen=True, slots=True)
class NsjailJail(Jail):
    """A jail made by nsjail.

    Attributes:
        binds: Further host paths that programs may read.
        tied: Words before nsjail's command that make it end with the process that started it.
        nice: Whether this nsjail lowers the program's priority unless ``--nice_level`` sets it.
    """

    binds: tuple[str, ...]
    tied: tuple[str, ...] = ()
    nice: bool = True


class NsjailSandbox(PerCallSandbox[NsjailJail]):
    """Runs each program in a fresh nsjail.

    Written for nsjail 3.4, which ``requirements/install-nsjail.sh`` installs. The launcher sets the system-call filter
    and the limits, because nsjail's limits count in megabytes. A run writes nothing to the host's disk: its program and
    mounts are anonymous files, so that a killed owner leaves nothing behind.
    """

    name = "nsjail"

    def _candidates(self) -> list[NsjailJail]:
        wanted = self._settings.nsjail_path
        path = shutil.which(wanted or "nsjail")
        if path is None:
            raise SandboxUnavailableError(
                f"nsjail was not found ({wanted or 'PATH'}); {NO_ISOLATION}: run requirements/install-nsjail.sh, or "
                "build https://github.com/google/nsjail and set nsjail_path, or use the backend 'zygote'"
            )
        answer = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=30, check=False)
        known = answer.stdout + answer.stderr
        if missing := [flag for flag in _NEEDED if flag not in known]:
            raise SandboxUnavailableError(
                f"{path} does not know {', '.join(missing)}; {NO_ISOLATION}: install nsjail 3.4 or newer"
            )
        identity = Identity.for_process()
        python = find_interpreter(self._settings, identity)
        setpriv = shutil.which("setpriv")
        tied = (setpriv, "--pdeathsig", "KILL", "--") if setpriv else ()
        nice = "--nice_level" in known
        return [NsjailJail(path, identity, python, filter_program(), self._settings.binds, tied, nice)]

    def _command(
        self, jail: NsjailJail, task: RunTask, files: contextlib.ExitStack
    ) -> tuple[list[str], tuple[int, ...]]:
        device = task.stdin if task.stdin_named else b""
        code = memory_file(task.program, files)
        config = memory_file(nsjail_config(jail, task.limits, device).encode(), files)
        return nsjail_command(jail, task.limits, code=code, config=config), (code, config)


def nsjail_command(jail: NsjailJail, limits: SandboxLimits, *, code: int, config: int) -> list[str]:
    """Return the command line of a run.

    Args:
        code: Descriptor of the program.
        config: Descriptor of the text from :func:`nsjail_config`.
    """
    uid = os.getuid() if jail.identity.uid is None else jail.identity.uid
    gid = os.getgid() if jail.identity.gid is None else jail.identity.gid
    words = [
        *(*jail.tied, jail.path, "--config", f"/proc/self/fd/{config}", "--mode", "o", "--quiet"),
        *("--user", str(uid), "--group", str(gid), "--hostname", "sandbox", "--cwd", "/tmp"),
        *("--time_limit", str(int(limits.wall_s) + _SPARE_S)),
        *("--disable_proc", "--disable_rlimits", "--iface_no_lo"),
        *("--pass_fd", "{report}", "--pass_fd", "{stderr}", "--pass_fd", str(code)),
    ]
    if jail.nice:
        words += ("--nice_level", str(os.getpriority(os.PRIO_PROCESS, 0)))
    for name, value in ENVIRONMENT.items():
        words += ("--env", f"{name}={value}")
    words += ("--env", "PWD=/tmp", "--")
    return words + launch(jail, limits, rules=jail.system_calls, code=str(code), stderr="{stderr}")


def nsjail_config(jail: NsjailJail, limits: SandboxLimits, stdin: bytes) -> str:
    """Return the mounts of a run as a configuration file, because nsjail's options cannot set ``nosuid``.

    Args:
        stdin: Content of ``/dev/stdin``.
    """
    space = f"size={limits.file_bytes},nr_inodes={INODES},mode=0755"
    mounts = [
        _mount(dst="/", fstype="tmpfs", **_SAFE),  # covers nsjail's own, which allows setuid
        *(_bind(path, path) for path in (*jail.python.binds, *jail.binds)),
        *(_bind(path, path, nodev=False) for path in DEVICES),
        *(_bind(path, inside) for path, inside in jail.python.packages),
        *(_mount(src=target, dst=name, is_symlink=True) for name, target in jail.python.links),
        *(_mount(dst=at, fstype="tmpfs", options=space, rw=True, **_SAFE) for at in ("/tmp", "/dev/shm")),
    ]
    if stdin:
        mounts.append(_mount(src_content=stdin, dst="/dev/stdin", **_SAFE))
    else:  # nsjail cannot make an empty file
        mounts.append(_bind("/dev/null", "/dev/stdin", nodev=False))
    return "\n".join(mounts)


def _bind(path: str, inside: str, *, nodev: bool = True) -> str:
    return _mount(src=path, dst=inside, is_bind=True, nosuid=True, nodev=nodev)


def _mount(**fields: str | bytes | bool) -> str:
    """Return one ``mount`` in protobuf's text format."""
    words = [
        f"{name}: {str(value).lower()}" if isinstance(value, bool) else f'{name}: "{_escaped(value)}"'
        for name, value in fields.items()
    ]
    return f"mount {{ {' '.join(words)} }}"


def _escaped(value: str | bytes) -> str:
    data = value if isinstance(value, bytes) else os.fsencode(value)
    return data.decode("latin-1").translate(_ESCAPES)
