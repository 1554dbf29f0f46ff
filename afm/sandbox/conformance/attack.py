"""The format of hostile programs, their helper functions, and the check that runs them in a sandbox and judges them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afm.errors import SandboxError
from afm.sandbox.base import (
    CPU_AS_FAR_AS_SEEN,
    MEMORY_PER_PROCESS,
    ExitReason,
    LocalSandbox,
    RunResult,
    SandboxLimits,
)
from afm.sandbox.seccomp import CLONE, DENIED, MADVISE, MSYNC, PREADV2, SILENCED

LIMITS = SandboxLimits(wall_s=30.0, cpu_s=4, memory_bytes=512 << 20, file_bytes=8 << 20)
SURVIVOR = f"afm-survivor-{secrets.token_hex(4)}"
"""First word of the command line of daemons. Each process has its own, so that parallel checks do not see each other's."""
_HEADING = re.compile(r"^### (.+?)(?: => (.+))?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SandboxAttack:
    """A hostile program. It is limited, so that it does little harm if it gets through.

    Attributes:
        name: Completes the sentence "it tries to ...".
        code: The program. Without ``reasons`` it judges itself and prints ``OK:`` if it was stopped and ``BAD:`` if it
            got through.
        reasons: How the run must end instead.
        status: The exit status that the run must have, if it matters.
        printed: The whole standard output that the run must have, if it matters.
        before: A program that runs first. Its end does not matter.
        neighbour: A program that runs at the same time for about a second.
        survivor: First word of the command line of a process that must be gone afterwards.
        needs_memory_group: Only a memory cgroup can stop it.
        needs_cpu_group: Only a cgroup that counts CPU time can stop it.
        not_by: Backends that cannot stop it, with the reason. The check reports this as a known limit.
    """

    name: str
    code: str
    reasons: tuple[ExitReason, ...] = ()
    status: int | None = None
    printed: str | None = None
    before: str = ""
    neighbour: str = ""
    survivor: str = ""
    limits: SandboxLimits = LIMITS
    not_by: Mapping[str, str] = field(default_factory=dict)
    needs_memory_group: bool = False
    needs_cpu_group: bool = False

    def expected(self) -> str:
        """Return the expected end in words, for the table."""
        words = "/".join(self.reasons) or ("expected output" if self.printed is not None else "OK")
        return words if self.status is None else f"{words} {self.status}"


def attacks(text: str, **shared: Any) -> tuple[SandboxAttack, ...]:
    """Return the attacks of a text.

    Each begins with a line ``### NAME``. ``### NAME => error 9`` also states how its run must end: the reasons, then the
    exit status if it matters. The text between the lines ``# before`` and ``# then`` is the program that runs first.

    Args:
        shared: Further fields, the same for every attack.
    """
    _, *pieces = _HEADING.split(text)
    made = []
    for name, ending, body in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        words = (ending or "").split()
        status = int(words.pop()) if words and words[-1].lstrip("-").isdigit() else None
        before, _, code = body.removeprefix("\n# before\n").rpartition("\n# then\n")
        reasons = tuple(map(ExitReason, words))
        made.append(SandboxAttack(name, code, reasons, status, before=before, **shared))
    return tuple(made)


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
def daemon(*closed):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in closed:
                os.close(fd)
            os.execv(sys.executable, ["afm-survivor", "-c", "import time; time.sleep(60)"])
        os._exit(0)
    time.sleep(0.3)
""".replace("afm-survivor", SURVIVOR)


def armed(code: str, host: Mapping[str, object]) -> str:
    """Return a program with the helpers and constants that it uses."""
    column = 0 if platform.machine() == "x86_64" else 1
    others = {"clone": CLONE, "madvise": MADVISE, "msync": MSYNC, "preadv2": PREADV2}
    numbers = {name.upper(): pair[column] for name, pair in (DENIED | SILENCED | others).items()}
    lines = [f"{name} = {value!r}" for name, value in {**numbers, **host}.items()]
    return "\n".join([_PRELUDE, *lines, code])


_ALIVE = "print('alive')"


@dataclass(frozen=True, slots=True)
class AttackResult:
    """The result of one attack.

    Attributes:
        seen: The end of the run and its output, shortened.
        passed: Whether the sandbox stopped the attack.
        known_limit: Why this backend cannot stop it. A known limit does not count as a failure.
    """

    attack: SandboxAttack
    seen: str
    passed: bool
    known_limit: str = ""


async def check_sandbox(
    sandbox: LocalSandbox, attacks: Sequence[SandboxAttack]
) -> AsyncIterator[AttackResult]:
    """Try each attack, and check after each that the sandbox still works."""
    with canaries() as host:
        for attack in attacks:
            yield await attempt(sandbox, attack, host)


async def attempt(sandbox: LocalSandbox, attack: SandboxAttack, host: Mapping[str, object]) -> AttackResult:
    """Try one attack.

    Args:
        host: The names from :func:`canaries`.
    """
    isolation = await sandbox.isolation()
    try:
        if attack.before:
            await sandbox.run(armed(attack.before, host), limits=attack.limits)
        neighbour = asyncio.ensure_future(sandbox.run(attack.neighbour)) if attack.neighbour else None
        if neighbour is not None:
            await asyncio.sleep(0.3)
        result = await sandbox.run(armed(attack.code, host), limits=attack.limits)
        if neighbour is not None:
            await neighbour
        alive = (await sandbox.run(_ALIVE)).stdout == "alive\n"
    except SandboxError as error:
        return AttackResult(attack, f"the sandbox failed: {error}", passed=False)
    trouble = _trouble(attack, result)
    if not alive:
        trouble = "the next run failed"
    if attack.survivor and (left := _processes(attack.survivor)):
        trouble = f"processes {', '.join(left)} survived"
    limit = _known_limit(attack, isolation) if trouble else ""
    return AttackResult(attack, trouble or _seen(result), passed=not trouble, known_limit=limit)


def _known_limit(attack: SandboxAttack, isolation: Sequence[str]) -> str:
    needed = ((attack.needs_memory_group, MEMORY_PER_PROCESS), (attack.needs_cpu_group, CPU_AS_FAR_AS_SEEN))
    for group, without in needed:
        if group and any(without in line for line in isolation):
            return without
    return next((reason for name, reason in attack.not_by.items() if name == isolation[0].split()[0]), "")


def _trouble(attack: SandboxAttack, result: RunResult) -> str:
    if attack.printed is not None and result.stdout != attack.printed:
        return f"printed {result.stdout[:80]!r}"
    if attack.status is not None and result.exit_status != attack.status:
        return f"exit status {result.exit_status}"
    if attack.reasons:
        return "" if result.reason in attack.reasons else _seen(result)
    if attack.printed is None and not result.stdout.startswith("OK:"):
        return _seen(result)
    return ""


def _seen(result: RunResult) -> str:
    printed = ascii((result.stdout or result.stderr[-80:]).strip()[:80])[1:-1]
    return f"{result.reason}: {printed}"


def _processes(marker: str) -> list[str]:
    survivors = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(marker.encode()):
                survivors.append(folder.name)
    return survivors


@contextlib.contextmanager
def canaries() -> Iterator[dict[str, object]]:
    """Set up things on the host that no program may reach: a port, an abstract socket, a file and a variable."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        Path(folder).chmod(0o755)
        secret = Path(folder, "secret.txt")
        secret.write_text("SECRET-HOST-FILE", encoding="utf-8")
        secret.chmod(0o644)
        name = f"\0afm-canary-{secrets.token_hex(8)}"
        abstract.bind(name)
        abstract.listen(5)
        for server in (port, abstract):
            threading.Thread(target=_accept, args=(server,), daemon=True).start()
        os.environ["AFM_CANARY"] = "SECRET-VARIABLE"
        try:
            yield {"PORT": port.getsockname()[1], "SOCKET": name, "SECRET_PATH": str(secret)}
        finally:
            os.environ.pop("AFM_CANARY", None)
            for server in (port, abstract):
                server.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts


def _accept(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        connection.close()
