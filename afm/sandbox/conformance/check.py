"""Runs the attacks against a sandbox and judges what came of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from afm.errors import SandboxError
from afm.sandbox.base import LocalSandbox, RunResult
from afm.sandbox.conformance.attack import Attack
from afm.sandbox.conformance.prelude import armed
from afm.sandbox.policy import CPU_AS_FAR_AS_SEEN, MEMORY_PER_PROCESS

_SECRET = "SECRET-HOST-FILE"
_ALIVE = "print('alive')"


@dataclass(frozen=True, slots=True)
class AttackResult:
    """What came of one attack.

    Attributes:
        seen: How the run ended and what it printed, shortened.
        passed: Whether the attack failed.
        known_limit: Why this backend cannot stop it; such a finding does not count as a failure.
    """

    attack: Attack
    seen: str
    passed: bool
    known_limit: str = ""


async def check_sandbox(sandbox: LocalSandbox, attacks: Sequence[Attack]) -> AsyncIterator[AttackResult]:
    """Try each attack, and after each that the sandbox still works."""
    with canaries() as host:
        for attack in attacks:
            yield await attempt(sandbox, attack, host)


async def attempt(sandbox: LocalSandbox, attack: Attack, host: Mapping[str, object]) -> AttackResult:
    """Try one attack.

    Args:
        host: What :func:`canaries` gave.
    """
    isolation = await sandbox.isolation()
    try:
        if attack.before:
            await sandbox.run(armed(attack.before, host), limits=attack.limits)
        beside = asyncio.ensure_future(sandbox.run(attack.beside)) if attack.beside else None
        if beside is not None:
            await asyncio.sleep(0.3)
        result = await sandbox.run(armed(attack.code, host), limits=attack.limits)
        if beside is not None:
            await beside
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


def _known_limit(attack: Attack, isolation: Sequence[str]) -> str:
    needed = ((attack.needs_memory_group, MEMORY_PER_PROCESS), (attack.needs_cpu_group, CPU_AS_FAR_AS_SEEN))
    for group, without in needed:
        if group and any(without in line for line in isolation):
            return without
    return next((reason for name, reason in attack.not_by.items() if name == isolation[0].split()[0]), "")


def _trouble(attack: Attack, result: RunResult) -> str:
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
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(marker.encode()):
                found.append(folder.name)
    return found


@contextlib.contextmanager
def canaries() -> Iterator[dict[str, object]]:
    """Things on the host that no program may reach: a port, an abstract socket, a file, a variable."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        Path(folder).chmod(0o755)
        secret = Path(folder, "secret.txt")
        secret.write_text(_SECRET, encoding="utf-8")
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
