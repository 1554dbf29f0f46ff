"""A core with far more to do than it can: what a node looks like whose workers start too many programs."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_CROWD = 7


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """What this thread starts inside keeps to one core, also afterwards."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Seven processes compute all the time on the core of :func:`pinned`."""
    with contextlib.ExitStack() as started:
        with pinned():
            for _ in range(_CROWD):  # a session each: the kernel shares a core out by session
                spin = [sys.executable, "-S", "-c", "while True: pass"]
                process = subprocess.Popen(spin, start_new_session=True)
                started.callback(process.wait)
                started.callback(process.kill)
        yield
