"""Child processes that never outlive the one that started them, even if that is killed by ``kill -9``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "AFM_PARENT_PROCESS"
"""Set in a child's environment: the id of the process it must not outlive."""

_PR_SET_PDEATHSIG = 1


def tied_environment() -> dict[str, str]:
    """This process's environment, for a child that calls :func:`follow_parent`."""
    return os.environ | {PARENT_VARIABLE: str(os.getpid())}


def follow_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """:func:`die_with_parent`, if the one that started this process asked for it by :func:`tied_environment`."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        die_with_parent(number, parent=int(parent))


def die_with_parent(number: signal.Signals = signal.SIGTERM, *, parent: int | None = None) -> None:
    """Be sent ``number`` when the parent ends (Linux only).

    Call it at the start of the child, in its main thread.

    Args:
        parent: Process id of the parent, in case it has ended already; by default whoever is parent now.
    """
    if not sys.platform.startswith("linux"):
        return
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != expected:  # it ended before the request took effect
        raise SystemExit(128 + number)
