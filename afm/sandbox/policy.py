"""What every kind of jail grants a program, and the checks of the options that local sandboxes take.

Devices, environment and limits are the same for every kind of jail. Options are checked before anything is started.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Sequence
from typing import Any

from afm.errors import ConfigError, DataError
from afm.sandbox.base import SandboxLimits
from afm.sandbox.slots import own_cores

PROGRAM = "/tmp/main.py"
INODES = 4096
"""Files and folders in ``/tmp``, and in ``/dev/shm``, where the kind of jail can bound them."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program prints the same text
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # or each thread reserves 64 MiB of the address space that is its limit
}
MEMORY_PER_PROCESS = "memory is bounded for each process, not for all of a run together"
CPU_AS_FAR_AS_SEEN = "CPU time is bounded for all processes of a run that live or were waited for"
NO_ISOLATION = "model-written code does not run without isolation"


def kernel_limits(limits: SandboxLimits) -> dict[str, tuple[int, int]]:
    """Soft and hard value of each ``RLIMIT_`` of a run, set inside its own user namespace."""
    bounds = {
        "AS": limits.memory_bytes,
        "CPU": limits.cpu_s,
        "FSIZE": limits.file_bytes,
        "NOFILE": limits.open_files,
        "NPROC": limits.processes + 1,  # process 1 of the jail counts too
        "CORE": 1,  # no room for a dump; 0 would still start the host's crash handler, see core(5)
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "SIGPENDING": 64,
    }
    # SIGXCPU at the soft limit can be ignored, SIGKILL a second later cannot.
    wanted = {name: (value, value + (name == "CPU")) for name, value in bounds.items()}
    return {name: _allowed(name, *pair) for name, pair in wanted.items()}


def _allowed(name: str, soft: int, hard: int) -> tuple[int, int]:
    """What is wanted, or what this process has if that is less: nobody can raise it."""
    most = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
    return (soft, hard) if most == resource.RLIM_INFINITY else (min(soft, most), min(hard, most))


def encoded(what: str, text: str, limit: int) -> bytes:
    """``text`` as UTF-8.

    Raises:
        DataError: It is longer than ``limit`` bytes.
    """
    data = text.encode("utf-8", "replace")
    if len(data) > limit:
        raise DataError(f"{what} is {len(data)} bytes long, expected at most {limit}")
    return data


def user_namespace_advice(trouble: str) -> str:
    """The trouble in the kernel's words, and what to do about it."""
    advice = {
        "seccomp": "the kernel lacks seccomp filters (CONFIG_SECCOMP_FILTER)",
        "namespace": "the kernel forbids user namespaces; set kernel.unprivileged_userns_clone=1, "
        "user.max_user_namespaces above 0 and kernel.apparmor_restrict_unprivileged_userns=0, or in Docker "
        "--security-opt seccomp=unconfined",
        "uid map": "the kernel forbids user namespaces to this user (AppArmor: "
        "kernel.apparmor_restrict_unprivileged_userns=0)",
    }
    hints = [text for words, text in advice.items() if words in trouble.lower()]
    return "; ".join([trouble, *hints[:1], NO_ISOLATION])


_WHOLE_HOST = ("/", "/proc", "/sys")
_OWN_FOLDERS = ("/tmp", "/dev")
_LONGEST_START_S = 600.0


def host_paths(name: str, value: Any) -> tuple[str, ...]:
    """Host paths that programs shall see.

    Raises:
        ConfigError: No list, a path that is not absolute, or one that would show the host itself.
    """
    paths = _texts(name, value, '["/data"]')
    for path in paths:
        if not os.path.isabs(path):  # noqa: PTH117 - a text, not a file
            raise ConfigError(f"sandbox option {name}: got {path!r}, expected an absolute path")
        if os.path.realpath(path) in _WHOLE_HOST:
            raise ConfigError(f"sandbox option {name}: {path!r} would show the host's own files to programs")
    return paths


def binds_of_runs(value: Any) -> tuple[str, ...]:
    """Host paths that programs shall see at the same place.

    Raises:
        ConfigError: As :func:`host_paths`, or a run has a folder of its own there.
    """
    paths = host_paths("binds", value)
    for path in paths:
        if any(path == own or path.startswith(f"{own}/") for own in _OWN_FOLDERS):
            raise ConfigError(
                f"sandbox option binds: {path} cannot be shown to programs: they have a /tmp and /dev of their own; "
                "move it"
            )
    return paths


def groups_of_packages(name: str, value: Any) -> tuple[tuple[str, ...], ...]:
    """Groups of package names.

    Raises:
        ConfigError: No list of lists.
    """
    example = '[["numpy", "sympy"], ["scipy"]]'
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"sandbox option {name}: got {value!r}, expected lists in a list, e.g. {example}")
    return tuple(_texts(name, group, example) for group in value)


def whole_number(name: str, value: Any, least: int) -> int:
    """A number of things.

    Raises:
        ConfigError: No whole number, or less than ``least``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"sandbox option {name}: got {value!r}, expected a whole number from {least} on")
    return value


def parallel_runs(value: Any) -> int:
    """Runs at the same time; the number of cores of this process when ``None``.

    Raises:
        ConfigError: No whole number, or less than one.
    """
    return own_cores() if value is None else whole_number("max_parallel", value, 1)


def seconds(name: str, value: Any) -> float:
    """A time.

    Raises:
        ConfigError: No positive number, or more than ten minutes.
    """
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not 0 < value <= _LONGEST_START_S:
        raise ConfigError(
            f"sandbox option {name}: got {value!r}, expected seconds, at most {_LONGEST_START_S:g}"
        )
    return float(value)


def path_of_python(value: Any) -> str | None:
    """The sandbox's Python.

    Raises:
        ConfigError: No text.
    """
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"sandbox option python: got {value!r}, expected a path such as /usr/bin/python3")
    return value


def limits_or_default(value: Any) -> SandboxLimits:
    """The limits of runs that name none.

    Raises:
        ConfigError: They are no limits.
    """
    if value is None:
        return SandboxLimits()
    if not isinstance(value, SandboxLimits):
        raise ConfigError(f"sandbox option limits: got {value!r}, expected a mapping such as {{wall_s: 7}}")
    return value


def _texts(name: str, value: Any, example: str) -> tuple[str, ...]:
    whole = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not whole or not all(isinstance(text, str) and text for text in value):
        raise ConfigError(f"sandbox option {name}: got {value!r}, expected a list such as {example}")
    return tuple(value)
