"""What every kind of jail grants a program: the same devices, environment and limits."""

from __future__ import annotations

import resource

from afm.errors import DataError
from afm.sandbox.base import SandboxLimits

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
