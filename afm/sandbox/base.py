"""The interface of every sandbox for model-written Python: limits, settings, results and the grants of a jail."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, Field, Strict, field_validator, model_validator

from afm.configuration import Settings, validated
from afm.errors import suggestion

PROGRAM = "/tmp/main.py"
INODES = 4096
"""The most files and folders in ``/tmp``, and in ``/dev/shm``, if the jail can limit them."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # makes output reproducible
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each further arena would reserve 64 MiB of the limited address space
}
MEMORY_PER_PROCESS = "memory is limited per process, not for the whole run"
CPU_AS_FAR_AS_SEEN = "CPU time is limited for the processes of a run that are alive or were waited for"
NO_ISOLATION = "model-written code does not run without isolation"
BACKENDS = ("auto", "zygote", "bubblewrap", "nsjail")

_OF_BACKENDS = {"warm": ("auto", "zygote"), "start_s": ("auto", "zygote"), "nsjail_path": ("nsjail",)}
_WHOLE_HOST = ("/", "/proc", "/sys")
_OWN_FOLDERS = ("/tmp", "/dev")


class SandboxLimits(Settings):
    """Limits of one run. The defaults are those of the published system (5 s CPU time, 7 s wall clock)."""

    wall_s: float = Field(default=7.0, gt=0, le=86_400, strict=True)
    """Wall-clock time of a run, in seconds."""
    cpu_s: int = Field(default=5, gt=0, le=86_400, strict=True)
    """CPU time of each process and of all processes together, in seconds."""
    memory_bytes: int = Field(default=1 << 30, gt=0, le=1 << 44, strict=True)
    """Address space of each process. If cgroups are available, also the memory of all processes together."""
    file_bytes: int = Field(default=16 << 20, gt=0, le=1 << 40, strict=True)
    """Largest file that a program may write."""
    output_bytes: int = Field(default=1 << 16, gt=0, le=1 << 32, strict=True)
    """Largest standard output, and largest standard error. A program that writes more is stopped."""
    stdin_bytes: int = Field(default=1 << 20, gt=0, le=1 << 32, strict=True)
    """Largest standard input."""
    processes: int = Field(default=32, gt=0, le=1 << 16, strict=True)
    """Processes at the same time."""
    open_files: int = Field(default=64, gt=0, le=1 << 20, strict=True)
    """Open files per process."""


def limits_from(values: object) -> SandboxLimits:
    """Return limits from a mapping, such as the one in a request.

    Raises:
        ConfigError: A name is unknown or a value is out of range.
    """
    return validated(SandboxLimits, values, "sandbox limits")


def kernel_limits(limits: SandboxLimits) -> dict[str, tuple[int, int]]:
    """Return the soft and hard value of each ``RLIMIT_`` of a run. They are set inside the run's user namespace."""
    bounds = {
        "AS": limits.memory_bytes,
        "CPU": limits.cpu_s,
        "FSIZE": limits.file_bytes,
        "NOFILE": limits.open_files,
        "NPROC": limits.processes + 1,  # includes process 1 of the jail
        "CORE": 1,  # too small for a dump. 0 would still start the host's crash handler, see core(5)
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "SIGPENDING": 64,
    }
    # A program can ignore SIGXCPU at the soft limit, but not SIGKILL one second later.
    return {name: _allowed(name, value, value + (name == "CPU")) for name, value in bounds.items()}


def _allowed(name: str, soft: int, hard: int) -> tuple[int, int]:
    """Return the values, lowered to the hard limit of this process, which a child cannot raise."""
    most = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
    return (soft, hard) if most == resource.RLIM_INFINITY else (min(soft, most), min(hard, most))


def host_path(path: str) -> str:
    """Return ``path`` if programs may see this path of the host.

    Raises:
        ValueError: The path is relative, or would expose the host itself.
    """
    if not os.path.isabs(path):  # noqa: PTH117 - a text, not a file
        raise ValueError("an absolute path")
    if os.path.realpath(path) in _WHOLE_HOST:
        raise ValueError(f"another path: {path!r} would expose the host's own files to programs")
    return path


def _bind(path: str) -> str:
    if any(path == own or path.startswith(f"{own}/") for own in _OWN_FOLDERS):
        raise ValueError(
            f"another path: {path} is hidden by the /tmp and /dev of programs; move it elsewhere"
        )
    return path


_HostPath = Annotated[str, Field(min_length=1), AfterValidator(host_path)]


class SandboxSettings(Settings):
    """The choice of a sandbox and its options, which are also the arguments of :func:`afm.sandbox.open_sandbox`."""

    backend: str = "auto"
    """``zygote`` (warm and fast), ``bubblewrap`` or ``nsjail`` (one jail per run), or ``auto``, which is ``zygote`` or,
    if the kernel does not allow it, ``bubblewrap``."""
    python: Annotated[str, Field(min_length=1)] | None = None
    """The sandbox's Python, by default ``/usr/bin/python3``. The unprivileged user must be able to read it, which
    excludes a Python below a home directory."""
    limits: SandboxLimits = SandboxLimits()
    """Default limits of a run."""
    max_parallel: Annotated[int, Strict()] | None = Field(default=None, ge=1)
    """Runs at the same time. Further runs wait. The default is the number of cores, shared with the other sandboxes of
    this process (:class:`afm.sandbox.slots.Cores`)."""
    max_waiting: Annotated[int, Strict()] = Field(default=1 << 16, ge=0)
    """Runs that may wait. Further ones raise ``SandboxBusyError`` at once."""
    binds: tuple[Annotated[_HostPath, AfterValidator(_bind)], ...] = ()
    """Further host paths that programs may read."""
    packages: tuple[_HostPath, ...] | None = None
    """Folders of further packages, by default those of ``afm sandbox install``."""
    warm: tuple[tuple[Annotated[str, Field(min_length=1)], ...], ...] | None = None
    """Packages that zygotes import in advance, in groups. The default is the installed ones of
    :data:`afm.sandbox.interpreter.WARM`. A failed import is logged. A program runs in the first zygote that covers the
    packages it mentions, or in a smaller and faster one if it mentions none. It can import other packages too."""
    start_s: float = Field(default=20.0, gt=0, le=600)
    """Seconds that a zygote may take to start a program before it counts as hung."""
    nsjail_path: str | None = None
    """Path of nsjail's binary, by default looked up in ``PATH``."""

    @field_validator("backend")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in BACKENDS:
            raise ValueError(f"a sandbox backend; {suggestion(name, BACKENDS)}")
        return name

    @model_validator(mode="after")
    def _fits_backend(self) -> SandboxSettings:
        for name, backends in _OF_BACKENDS.items():
            if self.backend not in backends and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: an option of {' and '.join(backends)}, not of {self.backend!r}")
        return self

    def options(self) -> dict[str, Any]:
        """Return the settings that were set, as arguments of :func:`afm.sandbox.open_sandbox`."""
        return self.model_dump(exclude_unset=True, exclude_none=True)


class ExitReason(StrEnum):
    """The reason for the end of a run."""

    OK = "ok"
    ERROR = "error"
    """The program ended with a non-zero status."""
    TIMEOUT = "timeout"
    """The program reached the wall-clock limit."""
    CPU = "cpu"
    """One process of the program, or all of them together, exceeded the CPU limit."""
    MEMORY = "memory"
    """The program exceeded the memory limit."""
    OUTPUT = "output"
    """The program exceeded the output limit and was stopped."""
    KILLED = "killed"
    """A signal that no limit explains ended the program, or the sandbox was closed."""


_STARVED_SHARE, _IDLE_SHARE = 0.25, 0.2


class NamelessInput(str):
    """Standard input that a program can read only once and from its descriptor, because ``/dev/stdin`` is empty.

    For programs that start others and let each see only a part of the input.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of one run of a program.

    A run is idle while none of its threads wants a core, because all sleep or wait. It is starved while a thread wants a
    core and the kernel runs other programs. Both times count from the program's start, as far as they were observed.

    Attributes:
        stdout: Standard output, decoded as UTF-8 with invalid bytes replaced, without what follows ``output_bytes``.
        stderr: Standard error, likewise.
        exit_status: As in ``subprocess``: negative for a signal. ``None`` if the program was killed for a limit.
        stdout_cut: Whether the end of ``stdout`` is missing.
        stderr_cut: Whether the end of ``stderr`` is missing.
        starved_s: Wall-clock seconds in which the machine kept the program from computing.
        idle_s: Wall-clock seconds in which the program did not want to compute.
        peak_memory_bytes: Largest resident set of the program and the children it waited for, if known.
    """

    stdout: str
    stderr: str
    exit_status: int | None
    reason: ExitReason
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int | None = None
    stdout_cut: bool = False
    stderr_cut: bool = False
    starved_s: float = 0.0
    idle_s: float = 0.0

    def starved(self, wall_s: float) -> bool:
        """Return whether the machine, not the program, used up a limit of ``wall_s``.

        That is so if the program wanted a core nearly all the time and often had to wait for one. A program that slept
        or waited was not starved, nor was one whose own processes competed for the cores.
        """
        return self.starved_s >= _STARVED_SHARE * wall_s and self.idle_s <= _IDLE_SHARE * wall_s

    @property
    def missing(self) -> tuple[str, ...]:
        """The missing parts: ``end of stdout``, ``end of stderr``, both or neither."""
        cuts = {"end of stdout": self.stdout_cut, "end of stderr": self.stderr_cut}
        return tuple(name for name, cut in cuts.items() if cut)


class Sandbox(Protocol):
    """Runs Python programs in isolation. Cancelling :meth:`run` kills every descendant of the run.

    A failure of the program is a :class:`RunResult`. A failure of the sandbox is an exception, which says nothing about
    the program.
    """

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        """Run ``code`` once.

        Raises:
            DataError: ``code`` or ``stdin`` is larger than the limits allow.
            SandboxUnavailableError: This machine has no isolation. The message names what to install.
            SandboxBusyError: Too many runs are waiting.
            SandboxError: The sandbox itself failed.
        """
        ...

    async def close(self) -> None:
        """End every process of the sandbox."""
        ...


class LocalSandbox(Sandbox, Protocol):
    """A sandbox on this machine."""

    async def isolation(self) -> list[str]:
        """Return sentences that describe the isolation of programs from the host.

        Raises:
            SandboxUnavailableError: This machine has no isolation.
        """
        ...
