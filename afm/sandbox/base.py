"""What every sandbox for model-written Python has: limits, settings, results, the interface, and what a jail grants."""

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
BACKENDS = ("auto", "zygote", "bubblewrap", "nsjail")

_OF_BACKENDS = {"warm": ("auto", "zygote"), "start_s": ("auto", "zygote"), "nsjail_path": ("nsjail",)}
_WHOLE_HOST = ("/", "/proc", "/sys")
_OWN_FOLDERS = ("/tmp", "/dev")


class SandboxLimits(Settings):
    """Bounds of one run; the defaults follow the published system (5 s CPU, 7 s wall)."""

    wall_s: float = Field(default=7.0, gt=0, le=86_400, strict=True)
    """Wall-clock time of a run, in seconds."""
    cpu_s: int = Field(default=5, gt=0, le=86_400, strict=True)
    """CPU seconds of each process, and of all processes together."""
    memory_bytes: int = Field(default=1 << 30, gt=0, le=1 << 44, strict=True)
    """Address space of each process. Where a cgroup can be made, also the memory of all processes together."""
    file_bytes: int = Field(default=16 << 20, gt=0, le=1 << 40, strict=True)
    """Largest file that a program may write."""
    output_bytes: int = Field(default=1 << 16, gt=0, le=1 << 32, strict=True)
    """Bytes to keep of standard output, and the same of standard error."""
    stdin_bytes: int = Field(default=1 << 20, gt=0, le=1 << 32, strict=True)
    """Largest standard input."""
    processes: int = Field(default=32, gt=0, le=1 << 16, strict=True)
    """Processes at the same time."""
    open_files: int = Field(default=64, gt=0, le=1 << 20, strict=True)
    """Open files per process."""


def limits_from(values: object) -> SandboxLimits:
    """Limits from a mapping, e.g. of a request.

    Raises:
        ConfigError: An unknown name, or a value that is no positive number within reason.
    """
    return validated(SandboxLimits, values, "sandbox limits")


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
    return {name: _allowed(name, value, value + (name == "CPU")) for name, value in bounds.items()}


def _allowed(name: str, soft: int, hard: int) -> tuple[int, int]:
    """These values, or those of this process if they are lower: a process cannot raise its hard limit."""
    most = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
    return (soft, hard) if most == resource.RLIM_INFINITY else (min(soft, most), min(hard, most))


def host_path(path: str) -> str:
    """A path of the host that programs shall see.

    Raises:
        ValueError: It is not absolute, or would show the host itself.
    """
    if not os.path.isabs(path):  # noqa: PTH117 - a text, not a file
        raise ValueError("an absolute path")
    if os.path.realpath(path) in _WHOLE_HOST:
        raise ValueError(f"another path: {path!r} would show the host's own files to programs")
    return path


def _bind(path: str) -> str:
    if any(path == own or path.startswith(f"{own}/") for own in _OWN_FOLDERS):
        raise ValueError(
            f"another path: {path} cannot be shown to programs, which have a /tmp and /dev of their own; move it"
        )
    return path


_HostPath = Annotated[str, Field(min_length=1), AfterValidator(host_path)]


class SandboxSettings(Settings):
    """Which sandbox, and how: also the arguments of :func:`afm.sandbox.open_sandbox`."""

    backend: str = "auto"
    """``zygote`` (warm and fast), ``bubblewrap`` or ``nsjail`` (a jail for each run), or ``auto``: the first, and the
    second where the kernel does not allow it."""
    python: Annotated[str, Field(min_length=1)] | None = None
    """The sandbox's Python, ``/usr/bin/python3`` when ``None``. The unprivileged user must be able to read it, so not one
    below a home directory."""
    limits: SandboxLimits = SandboxLimits()
    """Bounds of a run that names none."""
    max_parallel: Annotated[int, Strict()] | None = Field(default=None, ge=1)
    """Runs at the same time, further ones wait. When ``None`` the number of cores, shared with the other sandboxes of this
    process (:class:`afm.sandbox.slots.Cores`)."""
    max_waiting: Annotated[int, Strict()] = Field(default=1 << 16, ge=0)
    """Runs that may wait; further ones raise ``SandboxBusyError`` at once."""
    binds: tuple[Annotated[_HostPath, AfterValidator(_bind)], ...] = ()
    """Further host paths that programs may read."""
    packages: tuple[_HostPath, ...] | None = None
    """Folders of further packages; those of ``afm sandbox install`` when ``None``."""
    warm: tuple[tuple[Annotated[str, Field(min_length=1)], ...], ...] | None = None
    """Of zygotes: packages to import beforehand, in groups; those of :data:`afm.sandbox.interpreter.WARM` that are
    installed when ``None``. One that cannot be imported is logged. A program gets the first zygote that covers the names
    it mentions; one that mentions none gets a small and faster zygote. It can import the others all the same."""
    start_s: float = Field(default=20.0, gt=0, le=600)
    """Of zygotes: how long one may take to get a program started before it counts as hung."""
    nsjail_path: str | None = None
    """Of nsjail: the binary; looked up in ``PATH`` when ``None``."""

    @field_validator("backend")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in BACKENDS:
            raise ValueError(f"a sandbox backend, {suggestion(name, BACKENDS)}")
        return name

    @model_validator(mode="after")
    def _fits_backend(self) -> SandboxSettings:
        for name, backends in _OF_BACKENDS.items():
            if self.backend not in backends and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: an option of {' and '.join(backends)}, not of {self.backend!r}")
        return self

    def options(self) -> dict[str, Any]:
        """What is set, as arguments of :func:`afm.sandbox.open_sandbox`."""
        return self.model_dump(exclude_unset=True, exclude_none=True)


class ExitReason(StrEnum):
    """Why a run ended."""

    OK = "ok"
    ERROR = "error"
    """The program ended with a non-zero status."""
    TIMEOUT = "timeout"
    """The wall-clock limit was reached."""
    CPU = "cpu"
    """A process of the program, or all of them together, took more CPU time than allowed."""
    MEMORY = "memory"
    """The program wanted more memory than allowed."""
    OUTPUT = "output"
    """More output than allowed; the program was stopped."""
    KILLED = "killed"
    """By a signal that no limit explains, or because the sandbox was closed."""


_STARVED_SHARE, _IDLE_SHARE = 0.25, 0.2


class NamelessInput(str):
    """Standard input that can be read once, from its descriptor: ``/dev/stdin`` is empty.

    For programs that run others and may let them see a part of it only.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of a program.

    Times at which nothing in the run wants a core are idle: it sleeps or waits. Times at which a thread wants one and the
    kernel runs others are starved. Both count from the program's start, as far as was seen.

    Attributes:
        stdout: Decoded as UTF-8, invalid bytes replaced; cut at ``output_bytes`` (its end is lost). So is ``stderr``.
        exit_status: As ``subprocess`` reports it: negative is a signal; ``None`` when it was killed for a limit.
        stdout_cut: Whether the end of stdout is missing; ``stderr_cut`` of stderr.
        starved_s: Seconds by the clock in which the machine kept the program from computing.
        idle_s: Seconds by the clock in which the program did not want to compute.
        peak_memory_bytes: Largest resident set of the program and its waited-for children, if known.
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
        """Whether the machine, and not the program, used up a limit of ``wall_s``.

        The program wanted a core nearly all the time, and often had to wait for one. A program that slept or waited on
        purpose was not starved. Nor was one whose own processes took the cores from each other.
        """
        return self.starved_s >= _STARVED_SHARE * wall_s and self.idle_s <= _IDLE_SHARE * wall_s

    @property
    def missing(self) -> tuple[str, ...]:
        """What was cut off, and on which side: ``end of stdout``, ``end of stderr``, both or neither."""
        cuts = {"end of stdout": self.stdout_cut, "end of stderr": self.stderr_cut}
        return tuple(name for name, cut in cuts.items() if cut)


class Sandbox(Protocol):
    """Runs Python programs in isolation. Cancelling :meth:`run` kills every descendant of the run.

    The program's failure is a :class:`RunResult`; the sandbox's own is an exception, and tells nothing about
    the program.
    """

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        """Run ``code`` once.

        Raises:
            DataError: ``code`` or ``stdin`` is larger than the limits allow.
            SandboxUnavailableError: No isolation on this machine (the message names what to install).
            SandboxBusyError: Too many runs wait already.
            SandboxError: The sandbox itself failed.
        """
        ...

    async def close(self) -> None:
        """End every process the sandbox holds."""
        ...


class LocalSandbox(Sandbox, Protocol):
    """A sandbox on this machine."""

    async def isolation(self) -> list[str]:
        """What isolates programs from the host, in sentences.

        Raises:
            SandboxUnavailableError: No isolation on this machine.
        """
        ...
