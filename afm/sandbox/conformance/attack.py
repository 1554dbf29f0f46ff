"""What an attack is, and what makes it fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from afm.sandbox.base import ExitReason, SandboxLimits

LIMITS = SandboxLimits(wall_s=8.0, cpu_s=4, memory_bytes=512 << 20, file_bytes=8 << 20)


@dataclass(frozen=True, slots=True)
class Attack:
    """A hostile program. It is bounded, so that it does little harm where it gets through.

    Attributes:
        name: What it tries, as the end of "it tries to ...".
        code: The program. Without ``reasons`` it judges itself: it prints ``OK:`` when it was stopped and
            ``BAD:`` when it got through.
        reasons: How the run must end instead.
        status: Exit status the run must have, if given.
        printed: What the whole standard output must be, if given.
        before: A program that runs first; its own end does not count.
        beside: A program that runs at the same time, for about a second.
        survivor: First word of the command line of a process that must be gone afterwards.
        limits: Bounds of the run.
        needs_memory_group: Only a memory cgroup can stop it.
        needs_cpu_group: Only a cgroup that counts CPU time can stop it.
        not_by: Backends that cannot stop it, with the reason: a known limit, shown and not hidden.
    """

    name: str
    code: str
    reasons: tuple[ExitReason, ...] = ()
    status: int | None = None
    printed: str | None = None
    before: str = ""
    beside: str = ""
    survivor: str = ""
    limits: SandboxLimits = LIMITS
    not_by: Mapping[str, str] = field(default_factory=dict)
    needs_memory_group: bool = False
    needs_cpu_group: bool = False

    def expected(self) -> str:
        """In words, for the table."""
        words = "/".join(self.reasons) or ("given output" if self.printed is not None else "OK")
        return words if self.status is None else f"{words} {self.status}"
