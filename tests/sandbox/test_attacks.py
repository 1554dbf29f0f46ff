"""Every known attack on every kind of sandbox, and proof that the attacks are real."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from afm.sandbox import ExitReason, RunResult, SandboxLimits, open_sandbox
from afm.sandbox.base import LocalSandbox
from afm.sandbox.conformance import ATTACKS, SandboxAttack, check_sandbox
from afm.sandbox.conformance.attack import LIMITS, armed, attempt, canaries
from afm.sandbox.conformance.cross_run import SHARED
from afm.sandbox.conformance.host import KERNEL, REACH

pytestmark = pytest.mark.sandbox
OTHERS = ("bubblewrap", "nsjail")
KNOWN_LIMITS = {
    "take memory in several processes",
    "make tens of thousands of files",
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


# Runs each attack in a fork of its own, and prints what each of them printed.
BATCH = """
import json, os, sys
for name, code in PROGRAMS:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 1)
        os.closerange(3, 64)
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writing)
    with open(reading) as file:
        print(json.dumps([name, file.read()]), flush=True)
    os.waitpid(child, 0)
"""


def batch(attacks: Iterable[SandboxAttack], host: Mapping[str, object]) -> str:
    return f"PROGRAMS = {[(attack.name, armed(attack.code, host)) for attack in attacks]!r}\n{BATCH}"


def judged(printed: str) -> dict[str, str]:
    return dict(json.loads(line) for line in printed.splitlines())


def is_harmless_to_others(attack: SandboxAttack) -> bool:
    """Whether it only tries to reach something and judges that itself, so that others can be tried beside it."""
    needs = (attack.reasons, attack.before, attack.neighbour, attack.survivor, attack.not_by, attack.printed)
    quiet = not any(needs) and attack.name not in LOUD
    return quiet and attack in (*REACH, *KERNEL, *SHARED)


LOUD = ("signal everything", "trace other processes", "forge the launcher's report", "find open descriptors")


# In a zygote, where a run is cheap, each attack is tried alone; elsewhere the harmless ones together.
PAIRS = [pytest.param("zygote", attack, id=f"zygote-{attack.name}") for attack in ATTACKS] + [
    pytest.param(name, attack, id=f"{name}-{attack.name}", marks=pytest.mark.slow)
    for name in OTHERS
    for attack in ATTACKS
    if not is_harmless_to_others(attack)
]


@pytest.mark.parametrize(("backend", "attack"), PAIRS, indirect=["backend"], scope="session")
async def test_attack_is_stopped(
    attack: SandboxAttack, sandbox: LocalSandbox, host: Mapping[str, object]
) -> None:
    finding = await attempt(sandbox, attack, host)
    if finding.known_limit:
        assert attack.name in KNOWN_LIMITS
        pytest.skip(finding.known_limit)
    assert finding.passed, finding.seen


@pytest.mark.parametrize("backend", OTHERS, indirect=True)
async def test_attacks_on_the_host_are_stopped(sandbox: LocalSandbox, host: Mapping[str, object]) -> None:
    attacks = [attack for attack in ATTACKS if is_harmless_to_others(attack)]
    assert len(attacks) > 40
    limits = LIMITS.model_copy(update={"wall_s": 60.0})
    result = await sandbox.run(batch(attacks, host), limits=limits)
    verdicts = judged(result.stdout)
    assert verdicts.keys() == {attack.name for attack in attacks}, result
    assert {name: text for name, text in verdicts.items() if not text.startswith("OK:")} == {}


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
    "speak to a concurrent run through locks on bytes",
    "drop or read what the host keeps in its cache",
    "have the kernel name a socket, and write to a name",
    "list the host's mounts",
    "pin huge pages in pipes, each for 4 KiB of the pipe",
)


@pytest.mark.slow
def test_outside_the_sandbox_the_attacks_get_through(host: Mapping[str, object], tmp_path: Path) -> None:
    code = batch((attack for attack in ATTACKS if attack.name in REAL), host)
    code = "import resource; resource.setrlimit(7, (20000, 20000))\n" + code
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    verdicts = judged(done.stdout)
    assert verdicts.keys() == set(REAL)
    assert {name: text for name, text in verdicts.items() if not text.startswith("BAD:")} == {}


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


async def test_an_attack_must_end_with_its_status() -> None:
    result = RunResult("alive\n", "", 99, ExitReason.ERROR, 0.1, 0.1)
    attacks = [attack for attack in ATTACKS if attack.reasons == (ExitReason.ERROR,)]
    findings = [finding async for finding in check_sandbox(Gullible(result), attacks)]
    assert {finding.seen for finding in findings if not finding.passed} == {"exit status 99"}
    assert all(finding.passed == (finding.attack.status is None) for finding in findings)
