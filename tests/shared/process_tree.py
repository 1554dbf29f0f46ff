"""Child processes, as listed by the kernel."""

import contextlib
import os
import signal
import time
from pathlib import Path


def descendants(pid: int | str = "self") -> list[str]:
    """Return the ids of all descendants of a process, parents first, including zombies."""
    numbers: list[str] = []
    for task in Path("/proc", str(pid), "task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                numbers += [child, *descendants(child)]
    return numbers


def ended(pid: int, seconds: float) -> int | None:
    """Wait for a child; return its exit status, or kill it after ``seconds`` and return ``None``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None
