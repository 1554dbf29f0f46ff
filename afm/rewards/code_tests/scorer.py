"""The scorer of programs: extracts the program from the answer, runs the row's tests, and reports how many pass."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from afm.agents.spec import AnswerFormat
from afm.errors import DataError, RewardError, SandboxError
from afm.rewards.base import Part, Sample
from afm.rewards.code_tests.compare import absolute_tolerance, layout_matters, same_output, same_value
from afm.rewards.code_tests.inside.plain import decode, encode
from afm.rewards.code_tests.problem import (
    CallCase,
    PrintCase,
    PrivateTests,
    Problem,
    question_id,
    read_problem,
)
from afm.rewards.code_tests.runner import CaseEnd, CaseRun, CaseRunner, TestPolicy
from afm.sandbox import Sandbox
from afm.trajectory.answer import answer_content, fenced

_MAX_PROGRAM_CHARS = 1 << 18
_ACCEPTED = {"1", "1.0", "ok", "true", "accepted", "yes", "correct"}
_WORDS = {
    CaseEnd.ERROR: "the program failed",
    CaseEnd.CPU: "computed for more than {limits.case_s:g} s",
    CaseEnd.WALL: "lasted more than {limits.wall_s:g} s",
    CaseEnd.OUTPUT: "more than {limits.output_bytes} bytes of output",
    CaseEnd.LOST: "not finished",
    CaseEnd.BROKEN: "the program failed",
}


class CodeTests:
    """Scores 1 if the program in the final answer passes all tests of its row, else 0.

    A program never has access to expected values, test programs or checkers. Outputs and return values leave the sandbox
    and are compared here. Test programs and checkers have their own sandbox runs. A program that crashes, hangs or
    destroys its run fails. The scorer abstains if the sandbox fails or the row's tests cannot run.

    Args:
        sandbox: Sandbox for the programs. Closed with the scorer.
        livecodebench: Files of LiveCodeBench whose complete tests replace the sample tests of its rows.
    """

    def __init__(
        self, sandbox: Sandbox, policy: TestPolicy | None = None, *, livecodebench: Path | None = None
    ) -> None:
        self._sandbox = sandbox
        self._policy = policy or TestPolicy()
        self._runner = CaseRunner(sandbox)
        self._rounds = TestRounds(self._runner, early_stop=self._policy.early_stop)
        self._private = PrivateTests(livecodebench) if livecodebench is not None else None

    async def judge(self, sample: Sample) -> Part:
        """Test the program in the agent's final answer."""
        content = answer_content(sample.segments, sample.spec)
        program = None if content is None else fenced(content)
        if program is None and content is not None and sample.spec.answer_format is not AnswerFormat.FENCE:
            program = content
        if not (program or "").strip():
            return Part(0.0, "the response has no final program")
        try:
            problem = await asyncio.to_thread(self._problem, sample)
            return await self.test(str(program), problem)
        except DataError as error:
            return Part(None, error.message)
        except SandboxError as error:
            return Part(None, f"sandbox: {error}")

    async def test(self, program: str, problem: Problem) -> Part:
        """Test one program.

        Raises:
            SandboxError: The sandbox failed.
        """
        if len(program) > _MAX_PROGRAM_CHARS:
            return Part(0.0, f"the program has more than {_MAX_PROGRAM_CHARS} characters")
        faults: list[str] = []
        total = len(problem.printing) + len(problem.calling)
        for cases in (self._printed(program, problem), self._called(program, problem)):
            async with aclosing(cases):
                async for fault in cases:
                    faults.append(fault)
                    if fault and self._policy.early_stop:
                        return self._part(faults, total)
        if problem.tests:
            checks = await self._rounds.judge(program, problem, self._policy)
            if checks.trouble or not checks.faults:
                return Part(None, f"tests: {checks.trouble or 'they check nothing'}")
            faults += checks.faults
            total += len(checks.faults)
        return self._part(faults, total)

    async def close(self) -> None:
        """Close the sandbox."""
        await self._sandbox.close()

    def _problem(self, sample: Sample) -> Problem:
        name = question_id(sample.ground_truth) if self._private is not None else None
        truth: Any = sample.ground_truth
        if self._private is not None and name is not None:
            truth = self._private.row(name) or truth
        return read_problem(truth, sample.extra_info)

    def _part(self, faults: Sequence[str], total: int) -> Part:
        passed = sum(not fault for fault in faults)
        if passed == total:
            return Part(1.0, f"{passed}/{total} cases pass")
        number, fault = next((number, fault) for number, fault in enumerate(faults, 1) if fault)
        if self._policy.early_stop:
            return Part(0.0, f"case {number} of {total} fails: {fault}")
        return Part(0.0, f"{passed}/{total} cases pass; case {number}: {fault}")

    async def _printed(self, program: str, problem: Problem) -> AsyncGenerator[str]:
        """Yield the fault of each case with standard input, ``""`` if it passes."""
        cases = problem.printing
        pairs = [(case.stdin, case.expected or "") for case in cases if case.expected is not None]
        tolerance = 0.0 if layout_matters(pairs, self._policy.tolerance) else self._policy.tolerance
        absolute = absolute_tolerance((expected for _, expected in pairs), tolerance)
        limits = self._bounds(cases)
        waiting = iter(cases)
        inputs = [{"stdin": case.stdin} for case in cases]
        async for batch in self._runner.run(program, inputs, limits, growing=self._policy.early_stop):
            pairs_run = list(zip(islice(waiting, len(batch)), batch, strict=True))
            judged = await self._checked(problem, pairs_run) if problem.checker else None
            for number, (case, run) in enumerate(pairs_run):
                if run.end is not CaseEnd.OK:
                    yield self._failure(run)
                elif judged is not None:
                    yield judged[number]
                elif same_output(run.output, case.expected or "", tolerance, absolute):
                    yield ""
                else:
                    printed, expected, given = map(_shown, (run.output, case.expected or "", case.stdin))
                    yield f"printed {printed}, expected {expected}, for the input {given}"

    async def _checked(self, problem: Problem, runs: Sequence[tuple[PrintCase, CaseRun]]) -> list[str]:
        """Return the fault that the problem's checker finds in each output, ``""`` if none."""
        cases = [
            {"files": {"input": case.stdin, "expected": case.expected or "", "output": run.output}}
            for case, run in runs
        ]
        verdicts: list[CaseRun] = []
        limits = self._policy.within(output_bytes=1 << 16)
        async for batch in self._runner.run(problem.checker or "", cases, limits, growing=False):
            verdicts += batch
        if verdicts[0].end is CaseEnd.BROKEN:
            raise DataError(f"the row's checker is not a program: {verdicts[0].note}")
        return [_refusal(verdict, run.output) for verdict, (_, run) in zip(verdicts, runs, strict=True)]

    async def _called(self, program: str, problem: Problem) -> AsyncGenerator[str]:
        """Yield the fault of each function call, ``""`` if it passes."""
        limits = self._bounds(problem.calling)
        sessions = [
            {"session": [["entry", problem.function, encode(list(case.arguments)), {"dict": []}, None]]}
            for case in problem.calling
        ]
        absolute = absolute_tolerance((case.expected for case in problem.calling), self._policy.tolerance)
        waiting = iter(problem.calling)
        growing, helpers = self._policy.early_stop, problem.helpers
        async for batch in self._runner.run(program, sessions, limits, growing=growing, helpers=helpers):
            for case, run in zip(islice(waiting, len(batch)), batch, strict=True):
                yield self._call_fault(case, run, absolute)

    def _call_fault(self, case: CallCase, run: CaseRun, absolute: float) -> str:
        if run.end is not CaseEnd.OK or run.values is None or len(run.values) != 1:
            return self._failure(run)
        outcome = run.values[0]
        if "value" not in outcome:
            return str(outcome.get("text") or f"returned an object of type {outcome.get('object')}")[:300]
        wanted = [case.expected]
        if case.wrapped and isinstance(case.expected, list) and len(case.expected) == 1:
            wanted += case.expected
        try:
            value = decode(outcome["value"])
            if any(same_value(value, expected, self._policy.tolerance, absolute) for expected in wanted):
                return ""
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, MemoryError):
            return "returned something that cannot be read"
        return f"returned {_shown(_repr(value))}, expected {_shown(_repr(wanted[-1]))}"

    def _bounds(self, cases: Sequence[PrintCase | CallCase]) -> TestPolicy:
        longest = max((len(str(case.expected)) for case in cases), default=0)
        return self._policy.within(output_bytes=self._policy.output_bytes + 4 * longest)

    def _failure(self, run: CaseRun) -> str:
        words = _WORDS.get(run.end, "no answer").format(limits=self._policy)
        return f"{words}: {run.note}" if run.note else words


def _refusal(verdict: CaseRun, output: str) -> str:
    """Return why a checker with this result does not accept an output, ``""`` if it does."""
    words = verdict.output.split()
    if verdict.end is CaseEnd.OK and (not words or words[-1].lower() in _ACCEPTED):
        return ""
    reason = verdict.note or (words[-1][:80] if words else str(verdict.end))
    return f"the checker does not accept {_shown(output)}: {reason}"


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a huge number"


def _shown(text: str, length: int = 120) -> str:
    text = text.strip()
    return repr(text if len(text) <= length else f"{text[: length - 3]}...")


_LIMIT_WORDS = {CaseEnd.CPU: "too slow", CaseEnd.WALL: "too slow", CaseEnd.OUTPUT: "too much output"}
_MOST_ROUNDS = 100
_REMEMBERED = 512


@dataclass(frozen=True, slots=True)
class Checks:
    """The fault of each check in a test program, ``""`` if it passes, and why the checks cannot run, if they cannot."""

    faults: tuple[str, ...]
    trouble: str = ""


class TestRounds:
    """Judges programs by test programs.

    Args:
        runner: Runs both kinds of programs.
        early_stop: Whether to stop calling a program after a call that crashed or hung.
    """

    __test__ = False  # pytest must not collect it

    def __init__(self, runner: CaseRunner, *, early_stop: bool) -> None:
        self._runner = runner
        self._early_stop = early_stop
        self._first: OrderedDict[tuple[str, str | None], Mapping[str, Any]] = OrderedDict()

    async def judge(self, source: str, problem: Problem, limits: TestPolicy) -> Checks:
        """Run the test program of ``problem`` against ``source``.

        Only the first round, which knows nothing of the program, can find that the tests cannot judge. Tests that use
        objects of the program's classes can find it later. Any other later fault is the program's.

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
            except RewardError as error:  # the first round, without the program's answers, was fine
                return Checks((f"with the program's answers {error}",))
            left_s -= seconds + answer["spent_s"]
        return Checks(
            (f"the tests asked for answers that depend on answers {_MOST_ROUNDS} times, or for too long",)
        )

    async def _first_round(self, problem: Problem, limits: TestPolicy) -> Mapping[str, Any]:
        """Return the calls that the tests make. They are cached, because a group of programs has the same tests."""
        key = (f"{problem.helpers}\n{problem.tests}", problem.function)
        if key not in self._first:
            self._first[key] = await self._runner.judge(_task(problem, []), limits)
            if len(self._first) > _REMEMBERED:
                self._first.popitem(last=False)
        return self._first[key]

    async def _answers(
        self, source: str, helpers: str, wanted: list[Any], limits: TestPolicy, left_s: float
    ) -> tuple[list[tuple[Any, Any]], float]:
        """Return the program's answers and the seconds that they took."""
        cases = [{"session": session} for session in wanted]
        ran: list[CaseRun] = []
        within, early = limits.within(total_s=left_s), self._early_stop
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
    """Return the outcome of each step. A step without an answer failed."""
    if run.values is None or len(run.values) != steps:
        return [{"failed": run.note or _LIMIT_WORDS.get(run.end, "no answer")}] * steps
    return [
        value if _wholesome(value) else {"failed": "an answer that cannot be read"} for value in run.values
    ]


def _wholesome(value: Mapping[str, Any]) -> bool:
    """Return whether the proxies can read an outcome, so that the test program does not fail on it."""
    texts = [value.get(name, "") for name in ("raised", "known", "message")]
    if not {"value", "object", "raised", "failed"} & set(value) or not all(isinstance(t, str) for t in texts):
        return False
    try:
        decode(value.get("value"))
        return isinstance(decode(value.get("arguments", [])), list) and bool(json.dumps(value))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, MemoryError):
        return False
