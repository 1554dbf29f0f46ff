"""Run programs on cases in the sandbox, many cases per run, and read the answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from afm.configuration import Settings
from afm.errors import RewardError, SandboxError
from afm.rewards.code_tests.inside.serve import PRELUDE
from afm.sandbox import ExitReason, NamelessInput, RunResult, Sandbox, SandboxLimits, limits_from
from afm.sandbox.inside import shutdown

_FIRST_BATCH = 4
_LARGEST_BATCH = 64
_BATCH_BYTES = 8 << 20
_NOTE_CHARS = 300
_SLACK_S = 5.0
_ARRAYS = re.compile(r"\b(?:np|numpy)\b")
_DROPPED = re.compile(r"^from (?:__future__|afm\.\S+) import (?:\([^)]*\)|.*)\n", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+(\w+)", re.MULTILINE)
_WELL_KNOWN = (
    "array bisect collections copy dataclasses datetime decimal enum fractions functools heapq io itertools json math "
    "networkx numpy operator pandas queue random re scipy sortedcontainers statistics string sympy threading types typing"
)


class CaseEnd(StrEnum):
    """How one case ended."""

    OK = "ok"
    ERROR = "error"
    CPU = "cpu"
    """The case used more CPU time than allowed."""
    WALL = "wall"
    """The case took more wall-clock time than allowed."""
    OUTPUT = "output"
    """The program printed or returned more than allowed."""
    LOST = "lost"
    """The program ended the whole run, or the time for all cases was over."""
    BROKEN = "broken"
    """The program does not compile."""


@dataclass(frozen=True, slots=True)
class CaseRun:
    """What a program did in one case.

    Attributes:
        output: Its standard output.
        values: Outcomes of a session's steps (see ``inside/candidate.py``). ``None`` without a session.
        note: Why the case failed, in one line.
        spent_s: The case's share of the run's time in seconds, without the wait for a core.
    """

    end: CaseEnd
    output: str = ""
    values: tuple[Mapping[str, Any], ...] | None = None
    note: str = ""
    spent_s: float = 0.0


class TestPolicy(Settings):
    """How programs are tested: limits per case, and the tolerance for numbers."""

    __test__ = False  # pytest must not collect it

    early_stop: bool = True
    """Stop at the first failing test, as in training; otherwise every test is run and counted."""
    case_s: float = Field(default=6.0, gt=0)
    """CPU seconds per test. The wall-clock limit is twice as long plus one second."""
    total_s: float = Field(default=60.0, gt=0)
    """Wall-clock seconds of all tests of a program."""
    memory_bytes: int = Field(default=1 << 30, ge=1 << 26)
    """Memory of each process, in bytes."""
    output_bytes: int = Field(default=1 << 16, ge=1024)
    """Bytes that a test may print."""
    tolerance: float = Field(default=1e-6, ge=0, lt=1)
    """Relative and absolute tolerance for numbers with a fraction. 0 compares them as text."""

    def within(self, **bounds: float) -> TestPolicy:
        """Return the policy with other limits."""
        return self.model_copy(update=bounds)

    @property
    def wall_s(self) -> float:
        """Return the wall-clock limit of a case. It leaves room, so that a busy machine does not fail a fast program."""
        return 2 * self.case_s + 1


class CaseRunner:
    """Runs cases in a sandbox.

    Args:
        sandbox: The sandbox. Its owner closes it.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def run(
        self,
        source: str,
        cases: Sequence[Mapping[str, Any]],
        limits: TestPolicy,
        *,
        growing: bool,
        helpers: str = "",
    ) -> AsyncIterator[list[CaseRun]]:
        """Run ``source`` on ``cases`` and yield the results batch by batch. Each batch is one run of the sandbox.

        Args:
            cases: In the format of ``inside/candidate.py``.
            growing: Begin with small batches and stop a batch at its first failed case, for callers that stop at the first
                failure. The rest of that batch is missing.
            helpers: Definitions that functions of ``source`` may use.

        Raises:
            SandboxError: The sandbox failed, or the clock stopped a program that the machine starved, which says nothing
                about the program. Earlier cases have been yielded.
        """
        left_s = limits.total_s
        for batch in _batches(cases, growing):
            if left_s <= 0:
                yield [CaseRun(CaseEnd.LOST, note="the time for all cases together is over") for _ in batch]
                continue
            ran, result = await self._batch(source, batch, limits.within(total_s=left_s), growing, helpers)
            late = _stopped_by_clock(ran, result, min(left_s, len(batch) * limits.wall_s))
            if late is not None and result.starved(min(left_s, limits.wall_s)):
                if late:
                    yield ran[:late]
                raise SandboxError(
                    f"the machine is overloaded: a program waited {result.starved_s:.1f} of {result.wall_s:.1f} s for a "
                    "core before the clock stopped it; run fewer programs at a time (max_parallel)"
                )
            seconds = result.wall_s - result.starved_s
            left_s -= seconds
            yield [replace(case, spent_s=seconds / len(ran)) for case in ran]

    async def _batch(
        self, source: str, batch: Sequence[Mapping[str, Any]], limits: TestPolicy, growing: bool, helpers: str
    ) -> tuple[list[CaseRun], RunResult]:
        total_s = min(limits.total_s, len(batch) * limits.wall_s)
        cases = [json.dumps(case) for case in batch]
        session, shared = "session" in batch[0], shared_modules(helpers + source)
        task = {
            "program": source,
            "sizes": [len(case) for case in cases],
            "session": session,
            "cpu_s": limits.case_s,
            "wall_s": limits.wall_s,
            "total_s": total_s,
            "output_bytes": limits.output_bytes,
            "stop_early": growing,
            "prelude": f"{PRELUDE}\n{helpers}" if session else "",
            "shared": shared,
        }
        head = json.dumps(task)
        text = NamelessInput(f"{len(head):016d}{head}{''.join(cases)}")
        result = await self._sandbox.run(
            mentioning(program("plain", "shutdown", "serve", "candidate"), shared),
            text,
            _limits(text, total_s, limits.memory_bytes, 6 * len(batch) * (limits.output_bytes + 4096)),
        )
        return _read(result, len(batch), growing, total_s), result

    async def judge(self, task: Mapping[str, Any], limits: TestPolicy) -> dict[str, Any]:
        """Return the answer of ``inside/judge.py``.

        Raises:
            SandboxError: The sandbox failed.
            RewardError: The test program failed.
        """
        text = json.dumps({**task, "prelude": PRELUDE})
        bounds = _limits(text, limits.total_s, limits.memory_bytes, 64 << 20)
        names = ["numpy"] if _ARRAYS.search(task["tests"]) else []
        judge = mentioning(program("plain", "proxies", "judge"), names)
        result = await self._sandbox.run(judge, text, bounds)
        try:
            answer: dict[str, Any] = {
                **json.loads(result.stdout),
                "spent_s": result.wall_s - result.starved_s,
            }
        except (ValueError, RecursionError):
            if result.reason is ExitReason.TIMEOUT and result.starved(bounds.wall_s):
                raise SandboxError("the machine is overloaded: it starved the test program") from None
            reason = result.stderr.strip().rpartition("\n")[2][:_NOTE_CHARS]
            raise RewardError(
                f"the test program ended with {result.reason}: {reason or 'no message'}"
            ) from None
        return answer


def _limits(text: str, total_s: float, memory_bytes: int, output_bytes: int) -> SandboxLimits:
    size = len(text)
    return limits_from(
        {
            "wall_s": total_s + _SLACK_S,
            "cpu_s": math.ceil(total_s + _SLACK_S),
            "memory_bytes": memory_bytes + 8 * size,
            "file_bytes": (16 << 20) + 2 * size,
            "output_bytes": output_bytes,
            "stdin_bytes": size,
        }
    )


def _batches(cases: Sequence[Mapping[str, Any]], growing: bool) -> Iterator[Sequence[Mapping[str, Any]]]:
    size = _FIRST_BATCH if growing else _LARGEST_BATCH
    batch: list[Mapping[str, Any]] = []
    weight = 0
    for case in cases:
        more = len(case.get("stdin", "")) + sum(map(len, case.get("files", {}).values()))
        if batch and (len(batch) >= size or weight + more > _BATCH_BYTES):
            yield batch
            batch, weight = [], 0
            size = min(4 * size, _LARGEST_BATCH)
        batch.append(case)
        weight += more
    if batch:
        yield batch


def _read(result: RunResult, count: int, growing: bool, total_s: float) -> list[CaseRun]:
    """Return the cases in the run's output."""
    runs: dict[int, CaseRun] = {}
    for frame, answer, note in _frames(result.stdout):
        if "broken" in frame:
            return [CaseRun(CaseEnd.BROKEN, note=_short(frame["broken"]))] * (1 if growing else count)
        runs[frame["case"]] = _case(frame, answer, _short(note))
    last = max(runs, default=-1)
    complete = [runs.get(number, _lost(result, total_s)) for number in range(count)]
    stopped = growing and last >= 0 and runs[last].end is not CaseEnd.OK
    return complete[: last + 1] if stopped else complete


def _frames(text: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield line, answer and notes of each complete case (see ``inside/candidate.py``)."""
    position = 0
    while (start := text.find("\n", position)) >= 0:
        frame: dict[str, Any] = json.loads(text[position:start])
        mark = frame.get("mark", "\n")
        between = text.find(mark, start + 1)
        end = text.find(mark, between + len(mark))
        if "broken" not in frame and (between < 0 or end < 0):
            return
        yield frame, text[start + 1 : between], text[between + len(mark) : end]
        position = end + len(mark) + 1


def _case(frame: Mapping[str, Any], answer: str, note: str) -> CaseRun:
    end, status = CaseEnd(frame["end"]), int(frame["status"])
    if end is CaseEnd.ERROR and (status < 0 or not note):
        note = f"died of signal {-status}" if status < 0 else f"exit status {status}"
    return CaseRun(end, answer, _values(answer) if frame["session"] else None, note)


def _values(answer: str) -> tuple[Mapping[str, Any], ...] | None:
    """Return the outcomes in a program's output, which may be anything."""
    try:
        values = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        return None
    return tuple(values)


def _stopped_by_clock(ran: Sequence[CaseRun], result: RunResult, total_s: float) -> int | None:
    """Return the first case that the clock ended, at its own limit or that of all cases."""
    ends = {CaseEnd.WALL, CaseEnd.LOST} if result.wall_s >= total_s else {CaseEnd.WALL}
    return next((number for number, run in enumerate(ran) if run.end in ends), None)


def _lost(result: RunResult, total_s: float) -> CaseRun:
    if result.wall_s >= total_s:
        return CaseRun(CaseEnd.LOST, note="the time for all cases together is over")
    return CaseRun(
        CaseEnd.LOST, note=f"the run ended with {result.reason}: {_short(result.stderr)}".rstrip(": ")
    )


def _short(note: str) -> str:
    lines = note.strip().splitlines()
    return lines[-1][:_NOTE_CHARS] if lines else ""


@cache
def program(*names: str) -> str:
    """Return one program for the sandbox, built from modules in ``inside``. The last one has the ``main``.

    These modules import only each other from the project, and must run on Python 3.9. ``shutdown`` belongs to the sandbox.
    """
    own = Path(__file__).with_name("inside")
    paths = [Path(shutdown.__file__) if name == "shutdown" else own / f"{name}.py" for name in names]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return "from __future__ import annotations\n" + "".join(_DROPPED.sub("", text) for text in texts)


def shared_modules(source: str) -> list[str]:
    """Return the well-known modules that ``source`` seems to import, to import them once before forking the cases."""
    return sorted(set(_IMPORT.findall(source)).intersection(_WELL_KNOWN.split()))


def mentioning(text: str, names: list[str]) -> str:
    """Append a comment that names modules, so that the sandbox picks a warm interpreter that has them."""
    return f"{text}# for {' '.join(names)}\n" if names else text
