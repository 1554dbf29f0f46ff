"""The zygote's kernel calls for which Python has no function."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from typing import Any

# (x86_64, aarch64)
_NUMBERS = {
    "clone": (56, 220),
    "pivot_root": (155, 41),
    "capset": (126, 91),
    "close_range": (436, 436),
}
_COLUMN = {"x86_64": 0, "aarch64": 1}[platform.machine()]

_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000  # mount uts ipc user pid
_CLONE_PIDFD = 0x1000
_SET_DUMPABLE, _CAPBSET_DROP, _CAP_AMBIENT, _CLEAR_ALL = 4, 24, 47, 4
_LAST_CAPABILITY = 63

READ_ONLY, NO_SUID, NO_DEV, NO_EXEC, REMOUNT = 1, 2, 4, 8, 32
BIND, RECURSIVE, PRIVATE = 1 << 12, 1 << 14, 1 << 18
_DETACH = 2

# PyDLL holds the interpreter lock during a call, which a cloned process must own.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mount.argtypes = [*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p]


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(name: str, *arguments: Any) -> int:
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(int(_libc.syscall(ctypes.c_long(_NUMBERS[name][_COLUMN]), *wide)), name)


def clone_into_namespaces() -> tuple[int, int]:
    """Fork into fresh user, process, mount, IPC and UTS namespaces, from a process without threads.

    The child must only fork again, because Python's own work after a fork happens in that second child.

    Returns:
        Process id and pidfd of the child; ``(0, -1)`` in the child, which is process 1 of its namespace.
    """
    pidfd = ctypes.c_int(-1)
    flags = _NEW_NAMESPACES | _CLONE_PIDFD | signal.SIGCHLD
    ctypes.pythonapi.PyOS_BeforeFork()
    try:
        pid = _call("clone", flags, 0, ctypes.byref(pidfd), 0, 0)
    finally:
        ctypes.pythonapi.PyOS_AfterFork_Parent()  # in both processes, because it only releases the import lock
    return pid, pidfd.value if pid else -1


def map_user(uid: int, gid: int, groups_fixed: bool) -> None:
    """Map the user of the outer namespace to the same user in the new one.

    Args:
        groups_fixed: The result of :func:`groups_are_fixed` outside.
    """
    _prctl(_SET_DUMPABLE, 1)  # otherwise the files below belong to root
    if not groups_fixed:
        _write("/proc/self/setgroups", "deny")  # an unprivileged gid_map needs it: user_namespaces(7)
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")


def groups_are_fixed() -> bool:
    """Return whether the zygote's namespace forbids changes of groups, which nested namespaces inherit."""
    with open("/proc/self/setgroups", encoding="ascii") as file:  # noqa: PTH123 - pathlib is not loaded here
        return file.read().strip() == "deny"


def prefer_as_victim() -> None:
    """Make the kernel kill this process before the zygote when memory runs out."""
    _write("/proc/self/oom_score_adj", "1000")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Call ``mount(2)``."""
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    _checked(_libc.mount(*texts, flags, data.encode()), f"mount {kind or source} on {target}")


def become_root_directory(folder: str) -> None:
    """Make ``folder`` the root directory. Nothing else of the old tree stays reachable."""
    os.chdir(folder)
    # This mounts the old root on top of the new one, where it can be unmounted: see pivot_root(2), "pivot_root(., .)".
    _call("pivot_root", b".", b".")
    _checked(_libc.umount2(b".", _DETACH), "umount2")
    os.chdir("/")


def drop_capabilities() -> None:
    """Give up every capability permanently."""
    for number in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) < 0:
            break  # this kernel has no further capabilities
    _prctl(_CAP_AMBIENT, _CLEAR_ALL)
    _call("capset", struct.pack("<Ii", 0x20080522, 0), bytes(24))


def close_from(fd: int) -> None:
    """Close every descriptor from ``fd`` on."""
    try:
        _call("close_range", fd, 0xFFFFFFFF, 0)
    except OSError:  # before Linux 5.9
        os.closerange(fd, os.sysconf("SC_OPEN_MAX"))


def protect_from_peers() -> None:
    """Keep processes of the same user from inspecting this one."""
    _prctl(_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, *(ctypes.c_ulong(v) for v in (value, 0, 0, 0))), f"prctl {option}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:  # noqa: PTH123 - pathlib is not loaded here
        file.write(text)
