"""Attacks on CPU time."""

from __future__ import annotations

from dataclasses import replace

from afm.sandbox.base import ExitReason
from afm.sandbox.conformance.attack import LIMITS, Attack

ATTACKS = (
    Attack(
        "compute for ever where Python does not look at signals",
        "x = 10 ** (10 ** 9)",
        reasons=(ExitReason.CPU, ExitReason.MEMORY, ExitReason.TIMEOUT),
        limits=replace(LIMITS, cpu_s=1),
    ),
    Attack(
        "ignore the CPU limit's signal",
        """
import signal
for number in set(range(1, 65)) - {9, 19, 32, 33}:
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: pass""",
        reasons=(ExitReason.CPU,),
        limits=replace(LIMITS, cpu_s=1, wall_s=30.0),
    ),
    Attack(
        "burn the time of many cores",
        """
for _ in range(5):
    os.fork()
while True: pass""",
        reasons=(ExitReason.TIMEOUT, ExitReason.CPU),
        limits=replace(LIMITS, wall_s=1.5),
    ),
    Attack(
        "compute in one process after the other, each within its limit",
        """
for _ in range(12):
    child = os.fork()
    if child == 0:
        while time.process_time() < 0.6: pass
        os._exit(0)
    os.waitpid(child, 0)
print("BAD: 7 s of computing")""",
        reasons=(ExitReason.CPU,),
        limits=replace(LIMITS, cpu_s=1, wall_s=60.0),
    ),
    Attack(
        "compute in processes that nobody waits for",
        """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(12):
    child = os.fork()
    if child == 0:
        while time.process_time() < 0.6: pass
        os._exit(0)
    try:
        os.waitpid(child, 0)  # until it is gone; its time is nobody's
    except ChildProcessError:
        pass
print("BAD: 7 s of computing")""",
        reasons=(ExitReason.CPU,),
        limits=replace(LIMITS, cpu_s=1, wall_s=60.0),
        needs_cpu_group=True,
    ),
)
