"""Run many programs with crashes, limits, cancellations and dying zygotes, and check that nothing is left behind.

Usage: python benchmarks/soak_sandbox.py [--runs 50000] [--backend zygote] [--parallel N] [--out FILE]

Compares the state after a warm-up and at the end: zombies, descriptors, mounts, cgroups, temporary files, shared memory, and
the memory of this process and of the zygotes (growth under 5 %). Threads must stay within their pools. Exit status 1 if
anything is left.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from timing import environment, report

from afm.sandbox import SandboxLimits, open_sandbox
from afm.sandbox.base import LocalSandbox

GROWTH = 1.05
THREADS = (
    1 + 4 + min(32, (os.cpu_count() or 1) + 4)
)  # main, starters of zygotes, asyncio.to_thread: created on demand
LIMITS = SandboxLimits(wall_s=20.0, cpu_s=1, memory_bytes=256 << 20, output_bytes=4096)
SHORT = LIMITS.model_copy(update={"wall_s": 0.6})
PLAIN = ("print(input())", "ok")
MIX = {
    "raise": ("1/0", "error"),
    "crash": ("import ctypes; ctypes.string_at(0)", "error"),
    "kill itself": ("import os; os.kill(os.getpid(), 9)", "killed"),
    "sleep": ("import time; time.sleep(9)", "timeout"),
    "flood": ("while True: print('y' * 999)", "output"),
    "memory": ("x = bytearray(400 << 20)", "memory"),
    "daemon": ("import os, time\nif os.fork() == 0: os.setsid(); time.sleep(9)", "ok"),
    "files": ("for n in range(200): open(f'f{n}', 'w').write('x' * 999)", "ok"),
    "threads": (
        "import threading\nfor n in range(9): threading.Thread(target=print, args=(n,)).start()",
        "ok",
    ),
}
CANCEL = "cancelled"


@dataclass(frozen=True)
class Traces:
    """Everything that a sandbox could leave behind on the host."""

    zombies: int
    processes: int
    descriptors: int
    threads: int
    mounts: int
    cgroups: int
    temporary_files: int
    own_kib: int
    zygotes_kib: int


def traces() -> Traces:
    """Inspect this process, its descendants and the places where leftovers collect."""
    gc.collect()
    family = descendants(str(os.getpid()))
    stats = {pid: Path("/proc", pid, "stat").read_text().rpartition(")")[2].split() for pid in family}
    return Traces(
        zombies=sum(stat[0] == "Z" for stat in stats.values()),
        processes=len(family),
        descriptors=entries("/proc/self/fd"),
        threads=entries("/proc/self/task"),
        mounts=sum(lines(f"/proc/{pid}/mountinfo") for pid in ("self", *family)),
        cgroups=sum(
            f"afm-sandbox-{os.getpid()}" in name
            for _, names, _ in os.walk("/sys/fs/cgroup")
            for name in names
        ),
        temporary_files=entries(tempfile.gettempdir()),
        own_kib=own_memory(str(os.getpid())),
        zygotes_kib=sum(own_memory(pid) for pid in family),
    )


def entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def lines(path: str) -> int:
    with suppress(OSError):
        return len(Path(path).read_text().splitlines())
    return 0


def descendants(pid: str) -> list[str]:
    found: list[str] = []
    for task in Path("/proc", pid, "task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                found += [child, *descendants(child)]
    return found


def own_memory(pid: str) -> int:
    """Return the private memory in KiB."""
    with suppress(OSError):
        for line in Path("/proc", pid, "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1])
    return 0


async def one(sandbox: LocalSandbox, number: int, dice: random.Random, seen: Counter[str]) -> None:
    """Run one program: nine in ten are plain, the others hostile or cancelled."""
    if dice.random() < 0.9:
        name, (code, reason) = "plain", PLAIN
    else:
        name = dice.choice([*MIX, CANCEL])
        code, reason = MIX.get(name, ("import time; time.sleep(9)", CANCEL))
    limits = SHORT if reason == "timeout" else LIMITS
    run = asyncio.create_task(sandbox.run(code, str(number), limits))
    if name == CANCEL:
        await asyncio.sleep(dice.random() * 0.1)
        run.cancel()
        with suppress(asyncio.CancelledError):
            await run
        seen[name] += 1
        return
    result = await run
    seen[f"{name}: {result.reason}"] += 1
    assert name != "plain" or result.stdout == f"{number}\n", result
    assert result.reason == reason, (name, result)


async def many(
    sandbox: LocalSandbox, count: int, parallel: int, dice: random.Random, seen: Counter[str]
) -> None:
    """Run ``count`` programs with ``parallel`` callers; every 5,000 runs, kill a zygote from outside."""
    numbers = iter(range(count))

    async def caller() -> None:
        for number in numbers:
            if number % 5000 == 2500:
                kill_a_zygote()
            await one(sandbox, number, dice, seen)
            if number and number % 1000 == 0:
                print(f"{number} runs, {own_memory(str(os.getpid()))} KiB", flush=True)

    await asyncio.gather(*(caller() for _ in range(parallel)))


def kill_a_zygote() -> None:
    for pid in descendants(str(os.getpid())):
        with suppress(OSError):
            if b"/zygote/serve.py" in Path("/proc", pid, "cmdline").read_bytes().split(b"\0")[:9]:
                os.kill(int(pid), signal.SIGKILL)
                return


async def soak(options: argparse.Namespace) -> bool:
    """Run everything; return whether nothing was left."""
    sandbox = open_sandbox(options.backend, max_parallel=options.parallel)
    dice, seen = random.Random(0), Counter[str]()
    print(*await sandbox.isolation(), sep="\n")
    await many(sandbox, max(options.runs // 20, 500), options.parallel, dice, Counter())
    await asyncio.sleep(1)
    before, begun = traces(), time.monotonic()
    await many(sandbox, options.runs, options.parallel, dice, seen)
    seconds = time.monotonic() - begun
    await asyncio.sleep(1)
    after = traces()
    await sandbox.close()
    closed = traces()
    grown = [
        name
        for name, value in asdict(after).items()
        if value
        > (THREADS if name == "threads" else asdict(before)[name] * (GROWTH if name.endswith("kib") else 1))
    ]
    if closed.processes or closed.cgroups:
        grown.append("after closing")
    values = {"before": asdict(before), "after": asdict(after), "closed": asdict(closed)}
    result = {"runs": dict(seen), "runs_per_s": round(options.runs / seconds, 1), "grown": grown, **values}
    report({"environment": environment([]), "results": result}, options.out)
    return not grown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50_000)
    parser.add_argument("--backend", default="zygote")
    parser.add_argument("--parallel", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # separate, because other programs use /tmp as well
        tempfile.tempdir = folder
        good = asyncio.run(soak(options))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
