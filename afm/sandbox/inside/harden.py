"""Hardening of a launcher before it forks a program, and its channel for memory that the program was refused."""

from __future__ import annotations

import _sitebuiltins
import builtins
import ctypes
import fcntl
import mmap
import os
import sys
from opcode import opmap

_SET_THP_DISABLE = 41
_SIGSYS, _SIGNAL_INFORMATION = 31, 4
_RAISE = opmap["RAISE_VARARGS"]
# A handler of three arguments, the last of which is the interrupted call's context. It stores 2 (F_UNLCK) at
# the address in the call's third argument and 0 as the call's result.
_HANDLERS = {
    # mov rax, [rdx+136]; mov word [rax], 2; mov qword [rdx+144], 0; ret
    "x86_64": "488b8288000000 66c7000200 48c7829000000000000000 c3",
    # ldr x9, [x2, #200]; mov w10, #2; strh w10, [x9]; str xzr, [x2, #184]; ret
    "aarch64": "496440f9 4a008052 2a010079 5f5c00f9 c0035fd6",
}


def harden(devices: list[str]) -> None:
    """Remove what runs could share from this process and its children. Not for the program's own process.

    The process must not close a device afterwards.

    Args:
        devices: Host files that every run may open for writing.

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_THP_DISABLE, *(ctypes.c_ulong(value) for value in (1, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), "huge pages could not be switched off")
    for device in devices:
        # With a read lock on the whole file, no run can get a write lock, which other runs would notice.
        try:  # noqa: SIM105 - contextlib is slow to import
            fcntl.fcntl(os.open(device, os.O_RDONLY), fcntl.F_SETLK, bytes(32))
        except BlockingIOError:  # a process of the host holds a write lock, which must not stop all runs
            pass


def answer_lock_queries() -> None:
    """Make queries for the holder of a lock (``F_GETLK``) report no holder. Requests for locks still work.

    The kernel's answer would reveal the locks of other runs on files that all of them read. The filter turns the query
    into a signal. The handler is machine code, because Python runs its handlers only after the call. Only the program's
    process has it, because a signal from the program to process 1 must find no handler there.

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    machine = bytes.fromhex(_HANDLERS[os.uname().machine])
    libc.mmap.restype = ctypes.c_void_p
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    page = ctypes.c_void_p(libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0))
    ctypes.memmove(page, machine, len(machine))
    action = ctypes.create_string_buffer(152)  # struct sigaction: handler, mask, flags, restorer
    ctypes.memmove(action, ctypes.byref(page), 8)
    ctypes.memmove(ctypes.byref(action, 136), ctypes.byref(ctypes.c_int(_SIGNAL_INFORMATION)), 4)
    executable = mmap.PROT_READ | mmap.PROT_EXEC
    if libc.mprotect(page, mmap.PAGESIZE, executable) or libc.sigaction(_SIGSYS, action, None):
        raise OSError(ctypes.get_errno(), "a handler for lock queries was refused")


def filter_calls(rules: bytes) -> None:
    """Install a seccomp filter, an array of ``struct sock_filter``, for this process and its children.

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(rules, len(rules))

    class FilterProgram(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    program = FilterProgram(len(rules) // 8, ctypes.addressof(buffer))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "the seccomp filter was refused")


def look_started(path: str, imports: list[str]) -> None:
    """Make the interpreter look as if it had just started with the program ``path``.

    Args:
        imports: Import paths in addition to the standard library.
    """
    # A launcher skips the site module, which saves a third of the start-up time. These are its names.
    for word in ("exit", "quit"):
        setattr(builtins, word, _sitebuiltins.Quitter(word, "Ctrl-D"))
    builtins.help = _sitebuiltins._Helper()
    sys.path[0] = path.rpartition("/")[0]
    sys.path += imports
    sys.argv = [path]


class Refusal:
    """Tells the launcher that its program ended because memory was refused. Create it before the program is forked.

    Text on stderr would not be reliable, because a program can print any text.
    """

    def __init__(self) -> None:
        self._process = mmap.mmap(-1, 4)
        self._raise, self._getpid = _RAISE, os.getpid  # the program takes over the launcher's global names

    def note(self, error: BaseException) -> None:
        """Note the error that ends the program if it is a refusal of memory and not a ``raise`` in the program."""
        trace = error.__traceback__ if isinstance(error, MemoryError) else None
        while trace and trace.tb_next:
            trace = trace.tb_next
        if trace and trace.tb_frame.f_code.co_code[trace.tb_lasti] != self._raise:
            self._process[:] = self._getpid().to_bytes(4, "little")

    def ended(self, process: int) -> bool:
        """Return whether this process noted a refusal."""
        return int.from_bytes(self._process[:], "little") == process
