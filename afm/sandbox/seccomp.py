"""The system-call deny list of the sandbox, as a classic BPF program for ``bwrap --seccomp``.

The list denies calls that an untrusted Python program never needs and that kernel exploits use: new namespaces,
mounts, tracing, keyrings, BPF, io_uring, sockets, System V IPC and administration. It also denies calls with which one
run could affect others: locks on shared files, and contexts and watches with a limit per user or machine.
Everything else is allowed. Denied calls fail with EPERM, or with an error that makes honest programs do without
(:data:`ANSWERS`). Calls that could only burden the host's disk, caches or cores (:data:`SILENCED`) succeed without
effect. A foreign call convention kills the program.
"""

from __future__ import annotations

import contextlib
import errno
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from afm.errors import SandboxUnavailableError

# name: (x86_64, aarch64), with None if the architecture lacks the call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # inspection and control of other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "vmsplice": (278, 75),  # pins a huge page per 4 KiB in a pipe, which no process limit counts
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),  # paths of the host
    "listmount": (458, 458),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "fanotify_init": (300, 262),
    # kernel memory that outlives a run, or that other runs share
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_secret": (447, 447),
    "memfd_create": (319, 279),  # memory that no process limit counts
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "io_setup": (206, 0),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "flock": (73, 32),  # locks even files that are read-only here
    "mincore": (27, 232),  # shows which pages of shared files others have read
    "cachestat": (451, 451),
    # frequent sources of kernel exploits
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "socket": (41, 198),
    "bind": (49, 200),
    "connect": (42, 203),
    "listen": (50, 201),
    "sendmsg": (46, 211),  # sends descriptors, which count towards a limit per user. sendto remains
    "sendmmsg": (307, 269),
    "setsockopt": (54, 208),  # SO_PASSCRED makes the kernel name a socket
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    # administration
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "uselib": (134, None),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
}

OF_NETWORKS = frozenset({"socket", "bind", "connect", "listen", "sendmsg", "sendmmsg", "setsockopt"})
"""Denied calls that a program in its own network namespace needs to reach its loopback and the sockets mounted for it."""

SILENCED: dict[str, tuple[int | None, int | None]] = {
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "sync_file_range": (277, 84),
    "fadvise64": (221, 223),
    "readahead": (187, 213),
    "sched_setaffinity": (203, 122),
}
"""Calls that succeed without effect. The files of a run are in memory, and it must not flush those of the host. A run
that moved to the core of another one would look starved by the machine."""

ANSWERS = {
    "flock": errno.ENOSYS,  # libraries with locks (filelock, HDF5) then do without or report that locks are missing
    "io_setup": errno.ENOSYS,
    "inotify_init": errno.ENOSYS,
    "inotify_init1": errno.ENOSYS,
    "mincore": errno.ENOSYS,
    "cachestat": errno.ENOSYS,
    **dict.fromkeys(
        ("setxattr", "lsetxattr", "fsetxattr", "setxattrat"), errno.ENOTSUP
    ),  # shutil then still copies
}
"""The errors of denied calls for which EPERM would be misleading."""

# Calls judged by an argument, and clone3, whose flags BPF cannot read. ENOSYS makes libc use clone instead.
CLONE = (56, 220)
CLONE3 = (435, 435)
SOCKET = (41, 198)
SOCKETPAIR = (53, 199)
SENDTO = (44, 206)
IOCTL = (16, 29)
FCNTL = (72, 25)
MSYNC = (26, 227)
MADVISE = (28, 233)
PRCTL = (157, 167)
PREADV2 = (327, 286)

_NAMESPACE_FLAGS = 0x7E020000
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_TERMINAL, _OF_A_FAMILY = 0x5400, 0xFF00
_TERMINAL_REFUSED = (0x5412, 0x541C, 0x5423)  # TIOCSTI and TIOCLINUX type, TIOCSETD loads modules
_F_GETLK = 5
_F_OFD_LOCKS, _F_SETLEASE, _F_NOTIFY, _F_SET_HINTS = (36, 37, 38), 1024, 1026, (1036, 1038)
_MS_SYNC = 4
_MADV_MERGEABLE, _MADV_COLD, _MADV_PAGEOUT = 12, 20, 21
_PR_SET_THP_DISABLE, _PR_SET_MEMORY_MERGE = 41, 67
_RWF_NOWAIT, _RWF_DONTCACHE = 0x08, 0x80

_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO, _TRAP = 0x7FFF0000, 0x80000000, 0x00050000, 0x00030000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT = 0, 4, 16


@dataclass(frozen=True, slots=True)
class _Machine:
    audit: int
    column: int


_MACHINES = {"x86_64": _Machine(0xC000003E, 0), "aarch64": _Machine(0xC00000B7, 1)}


def filter_program(machine: str | None = None, *, networks: bool = False) -> bytes:
    """Return the filter as the kernel's array of ``struct sock_filter``.

    Args:
        machine: A name as in ``platform.machine()``, by default this machine.
        networks: Allow local sockets and queries for locks. For programs that start others in their own network
            namespace.

    Raises:
        SandboxUnavailableError: The machine has no table of call numbers.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise SandboxUnavailableError(
            f"the sandbox has no system-call table for {machine!r}, expected one of "
            f"{', '.join(_MACHINES)}; model-written code does not run without it"
        )
    target = _MACHINES[machine]
    code = _Assembler()
    code.add(_LOAD, _OFFSET_ARCH)
    code.add(_EQUAL, target.audit, 1, 0)
    code.give(_KILL)
    code.add(_LOAD, _OFFSET_NUMBER)
    if machine == "x86_64":  # the x32 convention adds 2**30 to the call numbers
        code.add(_AT_LEAST, 0x40000000, 0, 1)
        code.give(_KILL)
    code.refuse(CLONE3[target.column], errno.ENOSYS)
    for name, numbers in DENIED.items():
        number = numbers[target.column]
        if number is not None and not (networks and name in OF_NETWORKS):
            code.refuse(number, ANSWERS.get(name, errno.EPERM))
    for numbers in SILENCED.values():
        if (number := numbers[target.column]) is not None:
            code.refuse(number, 0)
    _judge_arguments(code, target.column, networks=networks)
    code.give(_ALLOW)
    return code.assembled()


def _judge_arguments(code: _Assembler, column: int, *, networks: bool) -> None:
    """Add the rules that depend on an argument. A call that matches no test of its rule is allowed."""
    with code.rule(CLONE[column]):
        code.give_if(0, _ANY_BIT, _NAMESPACE_FLAGS, _ERRNO | errno.EPERM)
    with code.rule(SOCKETPAIR[column]):
        code.give_if(0, _EQUAL, _AF_UNIX, _ALLOW)
        code.give(_ERRNO | errno.EPERM)
    if networks:
        with code.rule(SOCKET[column]):
            for family in (_AF_UNIX, _AF_INET, _AF_INET6):
                code.give_if(0, _EQUAL, family, _ALLOW)
            code.give(_ERRNO | errno.EAFNOSUPPORT)
    else:
        with code.rule(SENDTO[column]):  # refuse an address, whose pointer may have bits in either half
            for high in (False, True):
                code.give_if(4, _AT_LEAST, 1, _ERRNO | errno.EPERM, high=high)
    with code.rule(IOCTL[column]):  # isatty() needs some. Those of file systems can write to the host's disk
        for command in _TERMINAL_REFUSED:
            code.give_if(1, _EQUAL, command, _ERRNO | errno.EPERM)
        code.give_if(1, _EQUAL, _TERMINAL, _ALLOW, mask=_OF_A_FAMILY)
        code.give(_ERRNO | errno.ENOTTY)
    with code.rule(FCNTL[column]):
        if not networks:
            code.give_if(1, _EQUAL, _F_GETLK, _TRAP)  # see afm/sandbox/inside/harden.py
        for command in (*_F_OFD_LOCKS, *_F_SET_HINTS):
            code.give_if(1, _EQUAL, command, _ERRNO | errno.EINVAL)
        for command in (_F_SETLEASE, _F_NOTIFY):
            code.give_if(1, _EQUAL, command, _ERRNO | errno.EPERM)
    with code.rule(MSYNC[column]):
        code.give_if(2, _ANY_BIT, _MS_SYNC, _ERRNO)
    with code.rule(MADVISE[column]):
        for advice in (_MADV_COLD, _MADV_PAGEOUT):  # affect the host's cache
            code.give_if(2, _EQUAL, advice, _ERRNO)
        code.give_if(2, _EQUAL, _MADV_MERGEABLE, _ERRNO | errno.EINVAL)  # shares equal pages with other runs
    with code.rule(PREADV2[column]):  # its flags do the same as mincore and fadvise64
        code.give_if(5, _ANY_BIT, _RWF_NOWAIT | _RWF_DONTCACHE, _ERRNO | errno.EOPNOTSUPP)
    with code.rule(PRCTL[column]):
        code.give_if(0, _EQUAL, _PR_SET_MEMORY_MERGE, _ERRNO | errno.EINVAL)
        code.give_if(0, _EQUAL, _PR_SET_THP_DISABLE, _ALLOW, negate=True)
        for high in (False, True):  # the flags would leave some huge pages enabled
            code.give_if(2, _AT_LEAST, 1, _ERRNO | errno.EPERM, high=high)
        code.give_if(1, _EQUAL, 1, _ERRNO | errno.EPERM, negate=True)


class _Assembler:
    def __init__(self) -> None:
        self._instructions: list[bytes] = []

    def add(self, operation: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        self._instructions.append(struct.pack("<HBBI", operation, if_true, if_false, value))

    def give(self, action: int) -> None:
        self.add(_RETURN, action)

    def refuse(self, number: int, error: int) -> None:
        self.add(_EQUAL, number, 0, 1)
        self.give(_ERRNO | error)

    @contextlib.contextmanager
    def rule(self, number: int) -> Iterator[None]:
        """Apply the instructions that are added inside to call ``number`` only."""
        outer, self._instructions = self._instructions, []
        yield
        self.give(_ALLOW)
        inner, self._instructions = self._instructions, outer
        self.add(_LOAD, _OFFSET_NUMBER)
        self.add(_EQUAL, number, 0, len(inner))
        self._instructions += inner

    def give_if(
        self,
        argument: int,
        test: int,
        value: int,
        action: int,
        *,
        mask: int = 0,
        high: bool = False,
        negate: bool = False,
    ) -> None:
        """Return ``action`` if the low (or high) half of an argument, masked with ``mask``, passes the test."""
        self.add(_LOAD, _OFFSET_ARGUMENT + 8 * argument + 4 * high)
        if mask:
            self.add(_AND, mask)
        self.add(test, value, *((1, 0) if negate else (0, 1)))
        self.give(action)

    def assembled(self) -> bytes:
        return b"".join(self._instructions)
