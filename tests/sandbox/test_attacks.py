"""Every known attack on every kind of sandbox, and proof that the attacks are real."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from afm.sandbox import ExitReason, RunResult, SandboxLimits, open_sandbox
from afm.sandbox.base import LocalSandbox
from afm.sandbox.conformance import ATTACKS, SandboxAttack, check_sandbox
from afm.sandbox.conformance.attack import armed, attempt, canaries

pytestmark = pytest.mark.sandbox
KNOWN_LIMITS = {
    "take memory in several processes",
    "make a million files",
    "nest folders without end",
    "mark the host's devices",
    "compute in processes that nobody waits for",
}


@pytest.fixture(scope="module")
def sandbox(backend: str) -> Iterator[LocalSandbox]:
    made = open_sandbox(backend)
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def host() -> Iterator[Mapping[str, object]]:
    with canaries() as named:
        yield named


def test_there_are_many_attacks_and_each_has_a_name() -> None:
    assert len(ATTACKS) >= 100
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_attack_is_stopped(
    attack: SandboxAttack, sandbox: LocalSandbox, host: Mapping[str, object]
) -> None:
    finding = await attempt(sandbox, attack, host)
    if finding.known_limit:
        assert attack.name in KNOWN_LIMITS
        pytest.skip(finding.known_limit)
    assert finding.passed, finding.seen


REAL = (
    "connect to a port of the host",
    "connect to the host's abstract socket",
    "read a host file",
    "read a host file through a symbolic link",
    "read a host file in a race of links",
    "read the host's accounts",
    "see more than Python",
    "find secrets in the environment",
    "find out whose machine it is",
    "use a port of another run",
    "hoard memory in anonymous files, which no limit counts",
    "take shared memory",
    "open 10,000 files",
    "lock a file that other runs and the host use",
    "take the machine's contexts for asynchronous input and output",
    "watch what the host and other runs do with files",
    "make the host write its disks out",
    "name a pair of sockets, or use it as a server",
    "speak to a run beside it through locks on bytes",
    "drop or read what the host keeps in its cache",
    "have the kernel name a socket, and write to a name",
    "list the host's mounts",
    "pin huge pages in pipes, each for 4 KiB of the pipe",
)


@pytest.mark.parametrize("name", REAL)
def test_outside_the_sandbox_the_attack_gets_through(
    name: str, host: Mapping[str, object], tmp_path: Path
) -> None:
    attack = next(attack for attack in ATTACKS if attack.name == name)
    command = [
        sys.executable,
        "-c",
        "import resource; resource.setrlimit(7, (20000, 20000))\n" + armed(attack.code, host),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.startswith("BAD:"), done.stdout


class Gullible:
    """A sandbox that runs nothing and reports what it is told."""

    def __init__(self, result: RunResult) -> None:
        self._result = result

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        return self._result

    async def isolation(self) -> list[str]:
        return ["none", "memory is not bounded"]

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("printed", ["BAD: (True,)\n", "", "alive\n"])
async def test_a_sandbox_that_stops_nothing_fails_every_attack(printed: str) -> None:
    result = RunResult(printed, "", 99, ExitReason.OUTPUT, 0.1, 0.1)
    findings = [finding async for finding in check_sandbox(Gullible(result), ATTACKS[:3])]
    assert not any(finding.passed for finding in findings)
