"""The interface of a sandbox for model-written Python."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from afm.sandbox.settings import SandboxLimits


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

        The program wanted a core nearly all the time, and often had none. One that slept or waited on purpose was not
        starved, nor was one whose own processes took the cores from each other.
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
        """What stands between programs and the host, in sentences.

        Raises:
            SandboxUnavailableError: No isolation on this machine.
        """
        ...
