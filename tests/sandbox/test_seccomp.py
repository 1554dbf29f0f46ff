"""The filter, run by a small interpreter of classic BPF, and its call numbers against the kernel's headers."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from afm.errors import SandboxUnavailableError
from afm.sandbox.seccomp import (
    ANSWERS,
    CLONE,
    CLONE3,
    DENIED,
    FCNTL,
    IOCTL,
    MADVISE,
    MSYNC,
    PRCTL,
    PREADV2,
    SENDTO,
    SILENCED,
    SOCKETPAIR,
    filter_program,
)

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
def test_every_listed_call_is_refused(machine: str) -> None:
    for name, numbers in DENIED.items():
        number = numbers[COLUMN[machine]]
        if number is not None:
            assert verdict(machine, number) == refused(ANSWERS.get(name, errno.EPERM)), name


def test_programs_that_can_do_without_a_call_are_told_that_it_does_not_exist() -> None:
    assert verdict("x86_64", 73) == verdict("aarch64", 32) == refused(errno.ENOSYS)  # flock
    assert (
        verdict("x86_64", 188) == verdict("aarch64", 5) == refused(errno.EOPNOTSUPP)
    )  # setxattr: shutil.copy2 goes on
    assert verdict("x86_64", 41) == verdict("aarch64", 198) == refused(errno.EPERM)  # socket


@MACHINES
def test_calls_that_only_burden_the_host_succeed_without_an_effect(machine: str) -> None:
    for name, numbers in SILENCED.items():
        assert verdict(machine, numbers[COLUMN[machine]] or -1) == refused(0), name
    column = COLUMN[machine]
    assert verdict(machine, MSYNC[column], 0, 4096, 4) == refused(0)
    assert verdict(machine, MSYNC[column], 0, 4096, 1) == ALLOW  # MS_ASYNC: whether the memory is there
    for advice in (20, 21):  # MADV_COLD, MADV_PAGEOUT
        assert verdict(machine, MADVISE[column], 0, 4096, advice) == refused(0)
    assert verdict(machine, MADVISE[column], 0, 4096, 12) == refused(errno.EINVAL)  # MADV_MERGEABLE
    assert verdict(machine, MADVISE[column], 0, 4096, 4) == ALLOW  # MADV_DONTNEED


@MACHINES
def test_reads_neither_tell_what_is_in_the_cache_nor_drop_it(machine: str) -> None:
    number = PREADV2[COLUMN[machine]]
    for flags in (0x08, 0x80, 0x88, 0x09):  # RWF_NOWAIT, RWF_DONTCACHE
        assert verdict(machine, number, 3, 1, 1, 0, 0, flags) == refused(errno.EOPNOTSUPP)
    for flags in (0, 0x01):
        assert verdict(machine, number, 3, 1, 1, 0, 0, flags) == ALLOW


@MACHINES
def test_huge_pages_can_be_switched_off_and_not_on(machine: str) -> None:
    number = PRCTL[COLUMN[machine]]
    assert verdict(machine, number, 41, 1) == ALLOW
    for arguments in ((0,), (1, 2), (1, 2 << 32), (1 << 32,), (2,)):
        assert verdict(machine, number, 41, *arguments) == refused(errno.EPERM), arguments
    assert verdict(machine, number, 67, 1) == refused(errno.EINVAL)  # PR_SET_MEMORY_MERGE
    assert verdict(machine, number, 15, 1) == ALLOW


@MACHINES
def test_nothing_is_sent_to_an_address(machine: str) -> None:
    number = SENDTO[COLUMN[machine]]
    assert verdict(machine, number, 3, 1, 1, 0, 0, 0) == ALLOW
    for address in (1, 0x7FFF00001000, 1 << 32):
        assert verdict(machine, number, 3, 1, 1, 0, address, 16) == refused(errno.EPERM)


@MACHINES
def test_files_are_locked_by_programs_but_neither_leased_nor_watched_nor_marked(machine: str) -> None:
    number = FCNTL[COLUMN[machine]]
    assert verdict(machine, number, 3, 5) == TRAP  # F_GETLK, which inside/harden.py answers
    for command in (36, 37, 38, 1036, 1038):  # open file description locks; hints
        assert verdict(machine, number, 3, command) == refused(errno.EINVAL)
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
def test_nothing_is_typed_into_a_terminal_or_asked_of_a_file_system(machine: str) -> None:
    number = IOCTL[COLUMN[machine]]
    for command in (0x5412, 0x541C, 0x5423):
        assert verdict(machine, number, 0, command) == refused(errno.EPERM)
    for command in (
        0x5401,
        0x5413,
        0x5421,
        0x541B,
        0x802C542A,
    ):  # TCGETS, TIOCGWINSZ, FIONBIO, FIONREAD, TCGETS2
        assert verdict(machine, number, 0, command) == ALLOW
    for command in (0xC020660B, 0x9408, 0x80089418):  # FIEMAP, which can write out; Btrfs' own sync
        assert verdict(machine, number, 0, command) == refused(errno.ENOTTY)


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
        "madvise": MADVISE,
        "msync": MSYNC,
        "prctl": PRCTL,
        "preadv2": PREADV2,
        "sendto": SENDTO,
        **SILENCED,
    }
    shared = set(ours) & set(known)
    assert {name: ours[name][column] for name in shared} == {name: known[name] for name in shared}
    assert len(shared) > 60
