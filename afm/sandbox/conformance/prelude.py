"""What every hostile program begins with."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from afm.sandbox.seccomp import CLONE, DENIED, MADVISE, MSYNC, PREADV2, SILENCED

_PRELUDE = """
import ctypes, errno, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*arguments)
    return "BAD" if result >= 0 else os.strerror(ctypes.get_errno())
def reaches_kernel(*arguments):
    return libc.syscall(*arguments) != 0
def verdict(*answers):
    print("BAD:" if any(answer is True or "BAD" in str(answer) for answer in answers) else "OK:", answers)
def attempt(action):
    try:
        return action() is None or True
    except (OSError, PermissionError) as error:
        return type(error).__name__
"""


def armed(code: str, host: Mapping[str, object]) -> str:
    """A program with the helpers and constants it uses."""
    column = 0 if platform.machine() == "x86_64" else 1
    others = {"clone": CLONE, "madvise": MADVISE, "msync": MSYNC, "preadv2": PREADV2}
    numbers = {name.upper(): pair[column] for name, pair in (DENIED | SILENCED | others).items()}
    lines = [f"{name} = {value!r}" for name, value in {**numbers, **host}.items()]
    return "\n".join([_PRELUDE, *lines, code])
