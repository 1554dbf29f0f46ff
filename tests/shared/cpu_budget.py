"""A wall for the time of the suite: CPU seconds a test may cost, and all tests of a run together.

CPU seconds, because the wall clock of a test says as much about the machine's other jobs as about the test. They
are those of the test's process and of the child processes that it waited for; a daemon that outlives its test
(Ray's) is not in them. Tests with the marker `proof` have no limit.

A slow machine needs more CPU seconds for the same tests, and a suite without a fault went above its limit on one. So
each process also runs a fixed piece of work between tests, every `REFERENCE_EVERY_S` seconds. All costs are divided by
the mean cost of that work relative to `REFERENCE_S`.
"""

import os
import subprocess
import sys
import time
from collections import defaultdict
from statistics import fmean

import pytest

PROPERTY = "cpu_seconds"
REFERENCE_PROPERTY = "reference_cpu_seconds"
REFERENCE_S = 0.16
"""What the work costs about on the machine whose CPU seconds are the unit: a Xeon of 2.8 GHz without other jobs."""
REFERENCE_EVERY_S = 30.0
_REFERENCE = (
    "import argparse, asyncio, email.message, http.client, json, logging, sqlite3, unittest\n"
    "for _ in range(40): json.loads(json.dumps([{str(n): [n, n / 3]} for n in range(300)]))"
)
"""Half of it starts Python and imports, as most tests do, and half computes."""


def cpu_seconds() -> float:
    """CPU time of this process and its ended children so far."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def reference_seconds() -> float:
    """CPU seconds of the fixed piece of work, now and here."""
    before = cpu_seconds()
    subprocess.run([sys.executable, "-I", "-S", "-c", _REFERENCE], check=True)
    return cpu_seconds() - before


def excesses(
    costs: dict[str, float], slow: set[str], limits: tuple[float, float], total_limit: float
) -> list[str]:
    """One line for each test above its limit, and one for the sum.

    Args:
        costs: CPU seconds by test.
        slow: Tests with the marker `slow`.
        limits: CPU seconds of a test without the marker and of one with it.
        total_limit: CPU seconds of all tests together.
    """
    lines = []
    for test, cost in sorted(costs.items()):
        limit = limits[test in slow]
        if cost > limit:
            lines.append(f"{test}: {cost:.0f} CPU seconds, at most {limit:.0f} are allowed")
    total = sum(costs.values())
    if total > total_limit:
        lines.append(f"all tests: {total:.0f} CPU seconds, at most {total_limit:.0f} are allowed")
    return lines


def longest_files(costs: dict[str, float], seconds: dict[str, float], count: int = 20) -> list[str]:
    """The files that took longest, a line each: seconds by the clock, and of the processor.

    Where the first is far above the second, its tests wait.
    """
    files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for test, cost in costs.items():
        file = files[test.partition("::")[0]]
        file[0] += seconds[test]
        file[1] += cost
    ranking = sorted(files.items(), key=lambda entry: -entry[1][0])
    return [f"{wall:7.1f} s, {cpu:6.1f} of CPU  {name}" for name, (wall, cpu) in ranking[:count]]


class CpuBudget:
    """The pytest plugin: measures in each process, judges in the one that collects the reports."""

    def __init__(self, config: pytest.Config, limits: tuple[float, float], total_limit: float) -> None:
        self._is_worker = hasattr(config, "workerinput")
        self._collects = not self._is_worker and bool(config.getoption("numprocesses", None))
        self._limits, self._total_limit = limits, total_limit
        self._mark = 0.0
        self._next_reference = 0.0
        self._unreported: list[float] = []
        self._references: list[float] = []
        self._costs: dict[str, float] = defaultdict(float)
        self._seconds: dict[str, float] = defaultdict(float)
        self._slow: set[str] = set()

    def pytest_runtest_logstart(self) -> None:
        if time.monotonic() >= self._next_reference and not self._collects:
            self._unreported.append(reference_seconds())
            self._next_reference = time.monotonic() + REFERENCE_EVERY_S
        self._mark = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item):
        """Adds the cost of this phase to its report."""
        report = yield
        now = cpu_seconds()
        report.user_properties.append((PROPERTY, now - self._mark))
        report.user_properties += [(REFERENCE_PROPERTY, cost) for cost in self._unreported]
        self._unreported.clear()
        self._mark = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._references += [cost for name, cost in report.user_properties if name == REFERENCE_PROPERTY]
        if "proof" in report.keywords:
            return
        self._costs[report.nodeid] += sum(cost for name, cost in report.user_properties if name == PROPERTY)
        self._seconds[report.nodeid] += report.duration
        if "slow" in report.keywords:
            self._slow.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A run above its budget has failed."""
        if not self._is_worker and self._excesses() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = sum(self._costs.values()) / self._slowness
        terminalreporter.section(f"CPU time of the tests: {total:.0f} of {self._total_limit:.0f} s")
        terminalreporter.write_line(f"CPU seconds of this machine are divided by {self._slowness:.2f}")
        for line in longest_files(self._costs, self._seconds) + self._excesses():
            terminalreporter.write_line(line)

    @property
    def _slowness(self) -> float:
        """Cost of the fixed piece of work in this run, as a multiple of `REFERENCE_S`."""
        return fmean(self._references) / REFERENCE_S if self._references else 1.0

    def _excesses(self) -> list[str]:
        costs = {test: cost / self._slowness for test, cost in self._costs.items()}
        return excesses(costs, self._slow, self._limits, self._total_limit)
