"""The filter, run by a small interpreter of classic BPF, and its call numbers against the kernel's headers."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from afm.errors import SandboxUnavailableError
from afm.sandbox import seccomp
from afm.sandbox.seccomp import ANSWERS, DENIED, SILENCED, filter_program

ALLOW, KILL, TRAP = 0x7FFF0000, 0x80000000, 0x00030000
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
        if code == 0x54:
            accumulator &= value
            continue
        holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[
            code
        ]
        position += if_true if holds else if_false


MACHINES = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])


@MACHINES
def test_every_listed_call_is_refused_or_succeeds_without_an_effect(machine: str) -> None:
    for name, numbers in (DENIED | SILENCED).items():
        number = numbers[COLUMN[machine]]
        if number is not None:
            code = 0 if name in SILENCED else ANSWERS.get(name, errno.EPERM)
            assert verdict(machine, number) == refused(code), name


def test_programs_that_can_do_without_a_call_are_told_that_it_does_not_exist() -> None:
    assert verdict("x86_64", 73) == verdict("aarch64", 32) == refused(errno.ENOSYS)  # flock
    setxattr = refused(errno.EOPNOTSUPP)  # shutil.copy2 goes on
    assert verdict("x86_64", 188) == verdict("aarch64", 5) == setxattr
    assert verdict("x86_64", 41) == verdict("aarch64", 198) == refused(errno.EPERM)  # socket


NO_PERMISSION, INVALID = refused(errno.EPERM), refused(errno.EINVAL)
BY_ARGUMENTS: dict[str, tuple[tuple[int, int], dict[int, list[tuple[int, ...]]]]] = {
    # MS_SYNC, MS_ASYNC
    "nothing is written out": (seccomp.MSYNC, {refused(0): [(0, 4096, 4)], ALLOW: [(0, 4096, 1)]}),
    "the host's cache stays as it is": (
        seccomp.MADVISE,  # MADV_COLD, MADV_PAGEOUT; MADV_MERGEABLE; MADV_DONTNEED
        {refused(0): [(0, 4096, 20), (0, 4096, 21)], INVALID: [(0, 4096, 12)], ALLOW: [(0, 4096, 4)]},
    ),
    "reads neither tell what is in the cache nor drop it": (
        seccomp.PREADV2,  # RWF_NOWAIT, RWF_DONTCACHE
        {
            refused(errno.EOPNOTSUPP): [(3, 1, 1, 0, 0, flags) for flags in (0x08, 0x80, 0x88, 0x09)],
            ALLOW: [(3, 1, 1, 0, 0, 0), (3, 1, 1, 0, 0, 0x01)],
        },
    ),
    "huge pages can be switched off and not on": (
        seccomp.PRCTL,  # the last one is PR_SET_MEMORY_MERGE
        {
            ALLOW: [(41, 1), (15, 1)],
            NO_PERMISSION: [(41, 0), (41, 1, 2), (41, 1, 2 << 32), (41, 1 << 32), (41, 2)],
            INVALID: [(67, 1)],
        },
    ),
    "nothing is sent to an address": (
        seccomp.SENDTO,
        {
            ALLOW: [(3, 1, 1, 0, 0, 0)],
            NO_PERMISSION: [(3, 1, 1, 0, address, 16) for address in (1, 0x7FFF00001000, 1 << 32)],
        },
    ),
    "files are locked, but neither leased nor watched nor marked": (
        seccomp.FCNTL,  # allowed: F_SETLK, F_SETLKW, F_SETFL, F_DUPFD_CLOEXEC; invalid: locks of open files, hints
        {
            TRAP: [(3, 5)],  # F_GETLK, which inside/harden.py answers
            INVALID: [(3, command) for command in (36, 37, 38, 1036, 1038)],
            ALLOW: [(3, command) for command in (6, 7, 4, 1030)],
            NO_PERMISSION: [(3, 1024), (3, 1026)],
        },
    ),
    "clone makes threads and processes but no namespaces": (
        seccomp.CLONE,
        {
            ALLOW: [(0x3D0F00,), (0x01200011,)],  # what pthread_create and fork ask for
            NO_PERMISSION: [
                (flag | 17,)
                for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x2000000)
            ],
        },
    ),
    "clone3 is not there": (seccomp.CLONE3, {refused(errno.ENOSYS): [()]}),
    "socket pairs are unix ones": (seccomp.SOCKETPAIR, {ALLOW: [(1,)], NO_PERMISSION: [(16,)]}),
    "nothing is typed into a terminal or asked of a file system": (
        seccomp.IOCTL,  # allowed: TCGETS, TIOCGWINSZ, FIONBIO, FIONREAD, TCGETS2; not there: FIEMAP, Btrfs' own sync
        {
            NO_PERMISSION: [(0, command) for command in (0x5412, 0x541C, 0x5423)],
            ALLOW: [(0, command) for command in (0x5401, 0x5413, 0x5421, 0x541B, 0x802C542A)],
            refused(errno.ENOTTY): [(0, command) for command in (0xC020660B, 0x9408, 0x80089418)],
        },
    ),
}


@MACHINES
@pytest.mark.parametrize("promise", BY_ARGUMENTS)
def test_a_call_is_judged_by_its_arguments(promise: str, machine: str) -> None:
    numbers, outcomes = BY_ARGUMENTS[promise]
    for outcome, calls in outcomes.items():
        for arguments in calls:
            assert verdict(machine, numbers[COLUMN[machine]], *arguments) == outcome, arguments


@MACHINES
def test_ordinary_calls_pass(machine: str) -> None:
    ordinary = {
        "x86_64": (0, 1, 2, 9, 12, 39, 59, 60, 231, 257),
        "aarch64": (56, 57, 63, 64, 93, 94, 172, 214, 221),
    }
    assert all(verdict(machine, number) == ALLOW for number in ordinary[machine])


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
    tables = vars(seccomp).items()
    by_arguments = {name.lower(): pair for name, pair in tables if name[0] != "_" and isinstance(pair, tuple)}
    ours = DENIED | SILENCED | by_arguments
    shared = set(ours) & set(known)
    assert {name: ours[name][column] for name in shared} == {name: known[name] for name in shared}
    assert len(shared) > 60
