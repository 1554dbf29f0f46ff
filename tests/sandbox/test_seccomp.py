"""The filter, run by a small interpreter of classic BPF, and its call numbers against the kernel's headers."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from afm.errors import SandboxUnavailableError
from afm.sandbox.seccomp import ANSWERS, CLONE, CLONE3, DENIED, FCNTL, IOCTL, SOCKETPAIR, filter_program

ALLOW, KILL = 0x7FFF0000, 0x80000000
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COLUMN = {"x86_64": 0, "aarch64": 1}


def refused(code: int) -> int:
    return 0x00050000 | code


def verdict(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """What the kernel would decide, instruction by instruction."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<IIQ6Q", number, AUDIT[machine] if audit is None else audit, 0, *padded)
    program = list(struct.iter_unpack("<HBBI", filter_program(machine)))
    position, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = program[position]
        position += 1
        if code == 0x06:
            return int(value)
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
            continue
        holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[
            code
        ]
        position += if_true if holds else if_false


MACHINES = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])


@MACHINES
def test_every_listed_call_is_refused(machine: str) -> None:
    for name, numbers in DENIED.items():
        number = numbers[COLUMN[machine]]
        if number is not None:
            assert verdict(machine, number) == refused(ANSWERS.get(name, errno.EPERM)), name


@MACHINES
def test_programs_that_can_do_without_a_call_are_told_that_it_does_not_exist(machine: str) -> None:
    flock, setxattr, socket = (DENIED[name][COLUMN[machine]] for name in ("flock", "setxattr", "socket"))
    assert (flock, setxattr, socket) == {"x86_64": (73, 188, 41), "aarch64": (32, 5, 198)}[machine]
    assert verdict(machine, flock) == refused(errno.ENOSYS)
    assert verdict(machine, setxattr) == refused(errno.EOPNOTSUPP)  # shutil.copy2 goes on
    assert verdict(machine, socket) == refused(errno.EPERM)


@MACHINES
def test_files_are_locked_by_programs_but_neither_leased_nor_watched(machine: str) -> None:
    number = FCNTL[COLUMN[machine]]
    for command in (6, 7, 4, 1030):  # F_SETLK and F_SETLKW, which SQLite needs; F_SETFL; F_DUPFD_CLOEXEC
        assert verdict(machine, number, 3, command) == ALLOW
    for command in (1024, 1026):
        assert verdict(machine, number, 3, command) == refused(errno.EPERM)


@MACHINES
def test_ordinary_calls_pass(machine: str) -> None:
    ordinary = {
        "x86_64": (0, 1, 2, 9, 12, 39, 59, 60, 231, 257),
        "aarch64": (56, 57, 63, 64, 93, 94, 172, 214, 221),
    }
    assert all(verdict(machine, number) == ALLOW for number in ordinary[machine])


@MACHINES
def test_clone_makes_threads_and_processes_but_no_namespaces(machine: str) -> None:
    number = CLONE[COLUMN[machine]]
    assert verdict(machine, number, 0x3D0F00) == ALLOW  # what pthread_create asks for
    assert verdict(machine, number, 0x01200011) == ALLOW  # what fork asks for
    for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x2000000):
        assert verdict(machine, number, flag | 17) == refused(errno.EPERM)
    assert verdict(machine, CLONE3[COLUMN[machine]]) == refused(errno.ENOSYS)


@MACHINES
def test_socket_pairs_are_unix_ones(machine: str) -> None:
    number = SOCKETPAIR[COLUMN[machine]]
    assert verdict(machine, number, 1) == ALLOW
    assert verdict(machine, number, 16) == refused(errno.EPERM)


@MACHINES
def test_nothing_is_typed_into_a_terminal(machine: str) -> None:
    number = IOCTL[COLUMN[machine]]
    assert verdict(machine, number, 0, 0x5412) == refused(errno.EPERM)
    assert verdict(machine, number, 0, 0x5401) == ALLOW


@MACHINES
def test_foreign_call_conventions_kill(machine: str) -> None:
    assert verdict(machine, 1, audit=0x40000003) == KILL
    if machine == "x86_64":
        assert verdict(machine, 0x40000000 | 41) == KILL


def test_other_machines_are_refused() -> None:
    with pytest.raises(SandboxUnavailableError, match=r"'riscv64'.*x86_64, aarch64"):
        filter_program("riscv64")


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
)
def test_call_numbers_are_the_kernels(column: int, header: str) -> None:
    path = Path(header)
    if not path.exists():
        pytest.skip(f"{header} is not installed (linux-libc-dev)")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text(encoding="utf-8"))
    known = {name: int(number) for name, number in found}
    ours = DENIED | {
        "clone": CLONE,
        "clone3": CLONE3,
        "socketpair": SOCKETPAIR,
        "ioctl": IOCTL,
        "fcntl": FCNTL,
    }
    wrong = {
        name: (numbers[column], known.get(name))
        for name, numbers in ours.items()
        if name in known and numbers[column] != known[name]
    }
    assert not wrong
    assert len(set(ours) & set(known)) > 60
