"""The system-call deny list of the sandbox, as a classic BPF program for ``bwrap --seccomp``.

The list takes away what an untrusted Python program never needs and what kernel exploits are made of:
new namespaces, mounts, tracing, keyrings, BPF, io_uring, sockets, System V IPC, administration, and whatever one run
could take away from the others: locks on shared files, contexts and watches that are counted for a user or the machine.
Everything else is allowed. Denied calls fail with EPERM, or with what makes honest programs do without
(:data:`ANSWERS`); a foreign call convention kills the program.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

from afm.errors import SandboxUnavailableError

# name: (x86_64, aarch64); None where the architecture lacks the call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # looking into or steering other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
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
    "memfd_create": (319, 279),  # memory that no limit of a process counts
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "io_setup": (206, 0),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "flock": (73, 32),  # also of files that are read-only here
    "sync": (162, 81),
    "syncfs": (306, 267),
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
    "sendmsg": (46, 211),  # descriptors in flight, which are counted for a user; sendto remains
    "sendmmsg": (307, 269),
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

ANSWERS = {
    "flock": errno.ENOSYS,  # libraries with locks (filelock, HDF5) then do without, or say that there are none
    "io_setup": errno.ENOSYS,
    "inotify_init": errno.ENOSYS,
    "inotify_init1": errno.ENOSYS,
    **dict.fromkeys(("setxattr", "lsetxattr", "fsetxattr", "setxattrat"), errno.ENOTSUP),  # copying goes on
}
"""What denied calls fail with where EPERM would be misleading."""

# Calls judged by an argument, and clone3, whose flags BPF cannot read: ENOSYS makes libc use clone.
CLONE = (56, 220)
CLONE3 = (435, 435)
SOCKETPAIR = (53, 199)
IOCTL = (16, 29)
FCNTL = (72, 25)

_NAMESPACE_FLAGS = 0x7E020000
_AF_UNIX = 1
_TIOCSTI = 0x5412
_F_SETLEASE, _F_NOTIFY = 1024, 1026

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT = 0, 4, 16


@dataclass(frozen=True, slots=True)
class _Machine:
    audit: int
    column: int


_MACHINES = {"x86_64": _Machine(0xC000003E, 0), "aarch64": _Machine(0xC00000B7, 1)}


def filter_program(machine: str | None = None) -> bytes:
    """The filter as the array of ``struct sock_filter`` that the kernel takes.

    Args:
        machine: As ``platform.machine()`` names it; this machine when ``None``.

    Raises:
        SandboxUnavailableError: No table of call numbers for this machine.
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
    if machine == "x86_64":  # the x32 convention numbers the same calls from 2**30 on
        code.add(_AT_LEAST, 0x40000000, 0, 1)
        code.give(_KILL)
    code.refuse(CLONE3[target.column], errno.ENOSYS)
    for name, numbers in DENIED.items():
        number = numbers[target.column]
        if number is not None:
            code.refuse(number, ANSWERS.get(name, errno.EPERM))
    code.refuse_if(CLONE[target.column], argument=0, test=_ANY_BIT, values=(_NAMESPACE_FLAGS,))
    code.refuse_if(SOCKETPAIR[target.column], argument=0, test=_EQUAL, values=(_AF_UNIX,), negate=True)
    code.refuse_if(IOCTL[target.column], argument=1, test=_EQUAL, values=(_TIOCSTI,))
    code.refuse_if(FCNTL[target.column], argument=1, test=_EQUAL, values=(_F_SETLEASE, _F_NOTIFY))
    code.give(_ALLOW)
    return code.assembled()


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

    def refuse_if(
        self, number: int, *, argument: int, test: int, values: tuple[int, ...], negate: bool = False
    ) -> None:
        """Refuse call ``number`` when the low half of its argument passes the test with one of ``values``."""
        self.add(_EQUAL, number, 0, 2 + 2 * len(values))
        self.add(_LOAD, _OFFSET_ARGUMENT + 8 * argument)
        for value in values:
            self.add(test, value, *((1, 0) if negate else (0, 1)))
            self.give(_ERRNO | errno.EPERM)
        self.give(_ALLOW)

    def assembled(self) -> bytes:
        return b"".join(self._instructions)
