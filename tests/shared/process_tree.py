"""Child processes as the kernel lists them."""

import contextlib
import os
import signal
import time
from pathlib import Path


def descendants(pid: int | str = "self") -> list[str]:
    """Process ids of everything below a process, parents first, zombies included."""
    numbers: list[str] = []
    for task in Path("/proc", str(pid), "task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                numbers += [child, *descendants(child)]
    return numbers


def ended(pid: int, seconds: float) -> int | None:
    """Exit status of a child that is killed when it takes too long: then ``None``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None
