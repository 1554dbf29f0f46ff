"""Test programs and the program they test, in turn and never in one place.

The tests run without the program, in a sandbox run of their own, and say which calls they need. The program answers
those calls in another run, which has never seen the tests. Then the tests run again with the answers. What the
program can send to the tests is plain data: no ``__eq__``, no patched builtin, no early exit reaches them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from afm.errors import RewardError
from afm.rewards.code_tests.inside.plain import decode
from afm.rewards.code_tests.problem import Problem
from afm.rewards.code_tests.runner import CaseEnd, CaseLimits, CaseRun, CaseRunner

_WORDS = {CaseEnd.CPU: "too slow", CaseEnd.WALL: "too slow", CaseEnd.OUTPUT: "too much output"}
_MOST_ROUNDS = 100
_REMEMBERED = 512


@dataclass(frozen=True, slots=True)
class Checks:
    """The faults of the checks in a test program, ``""`` for each that passed; why they could not run, if so."""

    faults: tuple[str, ...]
    trouble: str = ""


class TestRounds:
    """Judges programs by test programs.

    Args:
        runner: Where both run.
        early_stop: Ask a program nothing more after a call that crashed or hung.
    """

    __test__ = False  # no test class, whatever pytest thinks

    def __init__(self, runner: CaseRunner, *, early_stop: bool) -> None:
        self._runner = runner
        self._early_stop = early_stop
        self._first: OrderedDict[tuple[str, str | None], Mapping[str, Any]] = OrderedDict()

    async def judge(self, source: str, problem: Problem, limits: CaseLimits) -> Checks:
        """Run the test program of ``problem`` against ``source``.

        Only the first round, which knows nothing of the program, can say that the tests cannot judge, or those that
        use objects of the program's classes. Whatever else goes wrong afterwards is what the program did.

        Raises:
            SandboxError: The sandbox failed.
        """
        known: list[tuple[Any, Any]] = []
        left_s = limits.total_s
        try:
            answer = await self._first_round(problem, limits)
        except RewardError as error:
            return Checks((), str(error))
        for _ in range(_MOST_ROUNDS):
            if answer["trouble"]:
                return Checks((), str(answer["trouble"]))
            if not answer["wanted"]:
                return Checks(tuple(map(str, answer["checks"])))
            if left_s <= 0:
                break
            answers, seconds = await self._answers(source, problem.helpers, answer["wanted"], limits, left_s)
            known += answers
            try:
                answer = await self._runner.judge(_task(problem, known), limits)
            except RewardError as error:  # it was fine before it had the program's answers
                return Checks((f"with the program's answers {error}",))
            left_s -= seconds + answer["spent_s"]
        return Checks(
            (f"the tests asked for answers that depend on answers {_MOST_ROUNDS} times, or for too long",)
        )

    async def _first_round(self, problem: Problem, limits: CaseLimits) -> Mapping[str, Any]:
        """The calls that the tests make, remembered: a group of programs has the same tests."""
        key = (f"{problem.helpers}\n{problem.tests}", problem.function)
        if key not in self._first:
            self._first[key] = await self._runner.judge(_task(problem, []), limits)
            if len(self._first) > _REMEMBERED:
                self._first.popitem(last=False)
        return self._first[key]

    async def _answers(
        self, source: str, helpers: str, wanted: list[Any], limits: CaseLimits, left_s: float
    ) -> tuple[list[tuple[Any, Any]], float]:
        """What the program answers, and in how many seconds."""
        cases = [{"session": session} for session in wanted]
        ran: list[CaseRun] = []
        within, early = replace(limits, total_s=left_s), self._early_stop
        async for batch in self._runner.run(source, cases, within, growing=early, helpers=helpers):
            ran += batch
            if self._early_stop and batch[-1].end is not CaseEnd.OK:
                break
        ran += [CaseRun(CaseEnd.LOST, note="not asked any more")] * (len(wanted) - len(ran))
        pairs = [(session, _outcomes(run, len(session))) for session, run in zip(wanted, ran, strict=True)]
        return pairs, sum(run.spent_s for run in ran)


def _task(problem: Problem, known: list[tuple[Any, Any]]) -> dict[str, Any]:
    tests = f"{problem.helpers}\n{problem.tests}" if problem.helpers else problem.tests
    return {"tests": tests, "entry": problem.function, "known": known}


def _outcomes(run: CaseRun, steps: int) -> list[Mapping[str, Any]]:
    """What each step answered; a step without an answer failed."""
    if run.values is None or len(run.values) != steps:
        return [{"failed": run.note or _WORDS.get(run.end, "no answer")}] * steps
    return [
        value if _wholesome(value) else {"failed": "an answer that cannot be read"} for value in run.values
    ]


def _wholesome(value: Mapping[str, Any]) -> bool:
    """Whether the stand-ins can read an outcome; the test program shall not stumble over it."""
    texts = [value.get(name, "") for name in ("raised", "known", "message")]
    if not {"value", "object", "raised", "failed"} & set(value) or not all(isinstance(t, str) for t in texts):
        return False
    try:
        decode(value.get("value"))
        return isinstance(decode(value.get("arguments", [])), list) and bool(json.dumps(value))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, MemoryError):
        return False
