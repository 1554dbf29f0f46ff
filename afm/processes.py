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
    """This process's environment, for a child that calls :func:`die_with_parent`."""
    return os.environ | {PARENT_VARIABLE: str(os.getpid())}


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Be sent ``number`` when the parent ends, if :func:`tied_environment` asked for it (Linux only).

    Call it at the start of the child, in its main thread.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != int(parent):  # it ended before the request took effect
        raise SystemExit(128 + number)
