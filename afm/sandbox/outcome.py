"""What the end of a jailed process says about the program that ran in it."""

from __future__ import annotations

import os
import signal

from afm.errors import SandboxError
from afm.sandbox.base import ExitReason, RunResult, SandboxLimits
from afm.sandbox.capture import Ended

_SAME = 0.5  # the kernel counts whole clock ticks for its limit, which on a busy machine are more than the time it reports


def outcome(ended: Ended, limits: SandboxLimits) -> RunResult:
    """The result of a run.

    Raises:
        SandboxError: The jail did not get as far as running the program.
    """
    lines = ended.report.split("\n")
    if lines[0] != "ready":
        if ended.reason is ExitReason.KILLED:
            return _as_result(ended, ExitReason.KILLED, None, None)
        message = (ended.report.removeprefix("failed: ") or ended.stderr.text()).strip()[-500:]
        if ended.reason is ExitReason.TIMEOUT:
            message = "it took too long; is this machine overloaded?"
        raise SandboxError(f"the jail did not start: {message or 'no message'}")
    status, peak = _parsed(lines[1:])
    if ended.reason is not None:
        return _as_result(ended, ended.reason, None, peak)
    if ended.out_of_memory and status != 0:
        return _as_result(ended, ExitReason.MEMORY, None, peak)
    if status is None:
        return _as_result(ended, ExitReason.KILLED, None, None)
    computed = ended.cpu_s >= _SAME * limits.cpu_s
    if computed and status in (-signal.SIGXCPU, -signal.SIGKILL):  # a program can send itself either
        return _as_result(ended, ExitReason.CPU, None, peak)
    if status == -signal.SIGKILL:
        return _as_result(ended, ExitReason.KILLED, status, peak)
    if status == 1 and "memory" in lines:
        return _as_result(ended, ExitReason.MEMORY, None, peak)
    return _as_result(ended, ExitReason.OK if status == 0 else ExitReason.ERROR, status, peak)


def _parsed(lines: list[str]) -> tuple[int | None, int | None]:
    """Exit status and peak memory in bytes from the launcher's report; ``None`` when it did not get that far."""
    try:
        wait_status, peak_kib = (int(word) for word in lines[0].split()[:2])
        return os.waitstatus_to_exitcode(wait_status), peak_kib * 1024
    except (IndexError, ValueError):
        return None, None


def _as_result(ended: Ended, reason: ExitReason, status: int | None, peak: int | None) -> RunResult:
    return RunResult(
        stdout=ended.stdout.text(),
        stderr=ended.stderr.text(),
        exit_status=status,
        reason=reason,
        wall_s=ended.wall_s,
        cpu_s=ended.cpu_s,
        peak_memory_bytes=peak,
        stdout_cut=ended.stdout.cut,
        stderr_cut=ended.stderr.cut,
        starved_s=ended.starved_s,
        idle_s=ended.idle_s,
    )
