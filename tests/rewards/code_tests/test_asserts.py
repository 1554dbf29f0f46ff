"""Test programs and the programs under test: what each decides, and which tests decide nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from answered import answered
from patient_scorer import PatientScorer

from afm.rewards.base import Part
from afm.rewards.code_tests import CodeTests
from afm.rewards.code_tests.problem import Problem
from afm.rewards.code_tests.runner import CaseEnd, CaseRun, TestPolicy
from afm.rewards.code_tests.scorer import TestRounds
from afm.sandbox import RunResult, Sandbox, SandboxLimits

pytestmark = pytest.mark.sandbox

POINT = (
    "class P:\n    def __init__(self, a, b): self.key = (a, b)\n"
    "    def __eq__(self, other): return self.key == other.key\n"
    "    def __lt__(self, other): return self.key < other.key\n"
)
BOX = (
    "class Box:\n    def __init__(self, x): self.x = {x}\n    def has(self, x): return x in self.x\n"
    "    def put(self, x):\n        self.x.add(x)\n        return True\n    def less(self, n): return len(self.x) - n + 1\n"
    "f = lambda x: Box(x)"
)
SAME, FOUR = "def f(x): return x", "def f(x): return 4"
AN_OBJECT = "class A:\n    left = print\ndef f(x): return A()"
CATCHING = "try:\n    f(1)\n    assert False, 'nothing raised'\nexcept {}:\n    pass"
MINE = "def f(x): raise type('Mine', (ValueError,), {})('x')"
NO_ANSWER = "try:\n    f(1)\nexcept ValueError:\n    pass\nassert f(2) == 2"
NUMBERS = (
    "assert not abs(float(f(7)) - 14) > 1e-6",
    "assert f(7) != 15\nassert max(0.0, abs(f(7) - 14)) < 1e-6",
    "assert not abs(float(str(f(7))) - 14) >= 1e-6",
)
ARGUMENTS_CHANGE = "import random\nfor n in range(9):\n    l = [random.random() for _ in range(n)]\n    assert f(l) == sum(l[::-1])"


async def judged(scorer: CodeTests, tests: str, program: str, **more: Any) -> Part:
    return await scorer.judge(answered("code", "livecodebench", program, {"test": tests} | more))


DECIDED = {
    "helpers that tests do not define are the standard library's": [
        (0, "assert Counter(f([1, 1, 2])) == Counter([1, 1, 3])", f"def Counter(x): return 1\n{SAME}"),
        (0, "assert log(f(1), 'gold') or f(1) == 'gold'", f"def log(*a): return True\n{SAME}"),
        (0, "assert reduce(add, f([1, 2])) == 7", f"def add(*a): return 7\ndef reduce(*a): return 7\n{SAME}"),
    ],
    "honest programs pass with them": [
        (1, "assert Counter(f([1, 1, 2])) == Counter([2, 1, 1])", SAME),
        (1, "assert isclose(f(2), sqrt(2))", "def f(x): return x ** 0.5"),
        (1, "assert sorted(f('ba')) == ['a', 'b']", "def f(x): return dict.fromkeys(x).keys()"),
        (1, "from collections import deque\nd = deque([2])\nf(d)\nassert not d", "def f(d): d.popleft()"),
        (1, "assert gcd(12, 18) == 6", "def gcd(a, b): return a if not b else gcd(b, a % b)"),
        (1, "for n in range(5):\n    assert add(n, 1) == n + 1", "def add(a, b): return a + b"),
        (1, "assert up('a') == 'A'\nassert low('A') == 'a'", "up = lambda x: x.upper()\nlow = str.lower"),
        (1, "from fractions import *\nassert f(2) == Fraction(4, 2)", SAME),
    ],
    "an expectation is made of the arguments as they were": [
        (0, "data = [3, 1]\nassert f(data) == [2 * x for x in data]", "def f(x): return x.clear() or []"),
        (0, "data = {1: 2}\nassert f(data) == len(data)", "def f(x): return x.clear() or 0"),
        (0, "for l in ([1, 2], [4, 5]):\n    assert f(l) == sum(l)", "def f(x): return x.clear() or 0"),
        (0, "l = [3, 1]\nprint(f(l))\nassert f(l) == sorted(l)", "def f(x):\n    x.clear()\n    return x"),
    ],
    "a program may change its arguments": [
        (1, ARGUMENTS_CHANGE, "def f(x):\n    total = sum(x[::-1])\n    x.clear()\n    return total"),
    ],
    "tests that some answer fails decide": [
        (0, "assert not f(2)", FOUR),
        (0, "if f(2) != 5:\n    raise SystemExit(1)", FOUR),
        (0, "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False", FOUR),
        (0, "assert all(f(n) == n for n in range(9))", FOUR),
        (0, "import unittest\nunittest.TestCase().assertEqual(f(2), 5)", FOUR),
    ],
    "an object in place of a value is wrong": [
        (0, "assert sorted([f(2), f(1)]) == [1, 2]", AN_OBJECT),
        (0, "assert f(f(1)) == 1", AN_OBJECT),
        (0, "assert f(f(1).left) == 1", AN_OBJECT),
        (1, "assert f(f(1)) == 1", SAME),
        (0, "assert P(1, 2) == (1, 2)", POINT),
        (1, "p = P(1, 2)\nassert p == p and p != 3 and p is not None", POINT),
    ],
    "iterators of programs still end": [
        (1, "assert [*f(2)] == [0, 1] and next(f(0), 9) == 9", "def f(x): return iter(range(x))"),
    ],
    "tests catch the class that was raised": [
        (1, CATCHING.format("ValueError"), MINE),
        (1, CATCHING.format("SystemExit"), "def f(x): raise SystemExit(0)"),
        (0, CATCHING.format("KeyError"), MINE),
    ],
    "the words of an exception decide nothing": [
        (0, NO_ANSWER, f"def f(x): raise {kind}({words!r})")
        for kind in ("TypeError", "ValueError")
        for words in (
            "catching classes that do not inherit from BaseException",
            "isinstance() arg 2 must be a type",
        )
    ],
    "a value that was never made is no helper that is missing": [
        (0, "got = f(1)\nassert got == 1\nassert got > 0", "def f(x): raise OSError"),
    ],
    "a method that only agrees proves nothing": [
        (0, "assert f(3).has(3)", BOX),
        (0, "assert f(3).has(x=3) == True", BOX),
        (1, "assert f(3).has(3)\nassert not f(3).has(4)", BOX),
        (1, "box = f(3)\nbox.put(4)\nassert box.has(4) and not box.has(5)\nassert box.less(1) == 2", BOX),
        (1, "box = Box(3)\nassert box.has(3)", BOX),
    ],
    "what is no number is wrong": [
        (score, tests, f"def f(x): return {value}")
        for tests in NUMBERS
        for value, score in (("float('nan')", 0), ("'nan'", 0), ("14.0", 1))
    ],
    "unless the tests ask for it": [
        (1, "import math\nassert math.isnan(f(0)) and not f(0) > 1", "def f(x): return float('nan')"),
    ],
}


@pytest.mark.parametrize("promise", DECIDED)
async def test_tests_decide(promise: str, training: CodeTests) -> None:
    for score, tests, program in DECIDED[promise]:
        part = await judged(training, tests, program)
        assert part.score == score, (tests, program, part.evidence)


COMPARERS = (
    "def approx(a, b): return True\nclass Checker:\n    def same(self, a, b): return True\n"
    "def checker(): return Checker()\ndef f(x): return 0\nclass Solution:\n    f = lambda self, x: 0"
)
CALLED = "def check(candidate):\n    assert approx(candidate(2), 5)"
SWALLOWED = (
    "def check(candidate):\n    try:\n        assert approx(candidate(2), 5)\n    except:\n        pass"
)


@pytest.mark.parametrize(
    ("tests", "more", "words"),
    [
        ("assert approx(f(2), 5)", {}, "'approx' and 'f'"),
        ("close = approx\nassert close(f(2), 5)", {}, "'approx' and 'f'"),
        ("c = checker()\nassert c.same(f(2), 5)", {}, "'checker' and 'f'"),
        ("assert approx(Solution().f(2), 5)", {}, "'Solution' and 'approx'"),
        (CALLED, {"entry_point": "f"}, "'approx'"),
        (SWALLOWED, {"entry_point": "f"}, "'approx'"),
    ],
)
async def test_tests_that_let_the_program_compare_abstain(
    tests: str, more: dict[str, str], words: str, training: CodeTests
) -> None:
    part = await judged(training, tests, COMPARERS, **more)
    assert part.score is None, part.evidence
    assert words in part.evidence


@pytest.mark.parametrize(
    ("program", "score"),
    [("def f(x): return x ** 0.5", 1), ("def isclose(a, b): return True\ndef f(x): return 1", 0)],
)
async def test_with_a_named_function_the_others_are_helpers(
    program: str, score: int, training: CodeTests
) -> None:
    tests = "def check(candidate):\n    assert isclose(candidate(4), 2) and Counter([candidate(1)])[1] == 1"
    assert (await judged(training, tests, program, entry_point="f")).score == score


@pytest.mark.parametrize("end", ["", "\n    return x", "\n    return True"])
@pytest.mark.parametrize(
    "tests",
    [
        "a = [3, 1]\nf(a)\nassert a == [1, 3]",
        "def t():\n    a = [3, 1]\n    f(a)\n    assert a == [1, 3]\nt()",
    ],
)
async def test_work_in_place_is_seen_where_the_value_is_not_used(
    tests: str, end: str, training: CodeTests
) -> None:
    assert (await judged(training, tests, f"def f(x):\n    x.sort(){end}")).score == 1.0
    assert (await judged(training, tests, f"def f(x):\n    sorted(x){end}")).score == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        "print(f(2) == 5)",
        "try:\n    assert f(2) == 5\nexcept:\n    pass",
        "def test():\n    return f(2) == 5\ntest()",
        "if f(2) == 5:\n    print('ok')\nelse:\n    print('failed')",
        "s = Stack()\ns.push(3)\ns.pop() == 3",
    ],
)
async def test_tests_that_no_answer_can_fail_abstain(tests: str, training: CodeTests) -> None:
    program = f"{FOUR}\nclass Stack:\n    def push(self, x): pass\n    pop = push"
    part = await judged(training, tests, program)
    assert (part.score, part.evidence) == (None, "tests: no wrong answer can fail them")


@pytest.mark.parametrize("swallow", ["except:", "except BaseException:"])
async def test_a_crash_is_no_exception_that_tests_expect(swallow: str, training: CodeTests) -> None:
    tests = f"try:\n    f(-1)\n{swallow}\n    pass\nassert f(1) == 1"
    for negative, score in (("__import__('os')._exit(0)", 0), ("raise OSError", 1)):
        program = f"def f(x):\n    if x < 0: {negative}\n    return x"
        part = await judged(training, tests, program)
        assert part.score == score, part.evidence


@pytest.mark.parametrize(
    "tests",
    [
        "assert P(1, 2) == P(1, 2)\nassert P(1, 2) != P(2, 2)",
        "assert P(1, 2) < P(2, 2)",
        "assert P(1, 2) in [P(2, 1), P(1, 2)]",
        "assert P(1, 2) + P(1, 2) == 3",
    ],
)
async def test_what_two_objects_of_the_program_are_to_each_other_is_not_judged(
    tests: str, training: CodeTests
) -> None:
    part = await judged(training, tests, POINT)
    assert part.score is None
    assert "the tests relate two objects of the program" in part.evidence


@pytest.mark.slow
@pytest.mark.parametrize("error", ["type('Mine', (StopIteration,), {})", "GeneratorExit"])
@pytest.mark.parametrize(
    "tests",
    [
        "assert all(map(lambda n: f(n) == n, [1, 2]))",
        "assert sum(map(f, [1, -1])) == 0",
        "assert next(map(f, [0]), 0) == 0",
        "assert list(iter(lambda: f(3), 3)) == []",
        "try:\n    right = all(map(f, [1]))\nexcept BaseException:\n    right = True\nassert right",
    ],
)
async def test_no_exception_of_the_program_ends_a_loop_of_the_tests(
    tests: str, error: str, training: CodeTests
) -> None:
    part = await judged(training, tests, f"def f(x): raise {error}", entry_point="f")
    assert part.score == 0.0, part.evidence


@pytest.mark.parametrize(
    "tests",
    [
        "try:\n    f(1)\nexcept Mine:\n    pass\nassert f(2) == 2",
        "assert isinstance(f(1), Mine)",
        "kind = Mine\nassert isinstance(f(1), kind)",
        "import unittest\nunittest.TestCase().assertRaises(Mine, f, 1)",
    ],
)
@pytest.mark.parametrize("program", ["Mine = TypeError\ndef f(x): raise Mine", "pass"])
async def test_tests_that_need_a_class_of_the_program_abstain_whatever_it_does(
    tests: str, program: str, training: CodeTests
) -> None:
    part = await judged(training, tests, program, entry_point="f")
    assert part.score is None, part.evidence


class OneSecond:
    """The real sandbox, with CPU time as the only limit, so that the load of the machine does not matter."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        bounds = (limits or SandboxLimits()).model_copy(update={"cpu_s": 1, "wall_s": 600.0})
        return await self._sandbox.run(code, stdin, bounds)

    async def close(self) -> None:
        """Do nothing. The owner closes the other runner."""


ENDLESS = "with the program's answers the test program ended with cpu"


@pytest.mark.slow
@pytest.mark.parametrize(("body", "score", "words"), [("n // 2", 1, "cases pass"), ("n", 0, ENDLESS)])
async def test_answers_that_depend_on_answers(body: str, score: int, words: str, training: CodeTests) -> None:
    tests = "n = 2 ** 5\nwhile n > 1:\n    n = f(n)\nassert n == 1"
    patient = PatientScorer(OneSecond(training._sandbox), training._policy)
    part = await judged(patient, tests, f"def f(n): return {body}")
    assert part.score == score, part.evidence
    assert words in part.evidence


class NeverContent:
    """A runner whose test program needs another answer after each one."""

    def __init__(self, spent_s: float) -> None:
        self._spent_s, self.asked = spent_s, 0

    async def judge(self, task: Any, limits: TestPolicy) -> dict[str, Any]:
        return {"checks": [], "wanted": [[self.asked]], "trouble": "", "spent_s": self._spent_s}

    async def run(self, *_: Any, **__: Any) -> AsyncIterator[list[CaseRun]]:
        self.asked += 1
        yield [CaseRun(CaseEnd.OK, values=({"value": 1},), spent_s=self._spent_s)]


@pytest.mark.parametrize(("spent_s", "rounds"), [(0.0, 100), (10.0, 3)])
async def test_rounds_are_bounded_in_number_and_in_time(spent_s: float, rounds: int) -> None:
    runner = NeverContent(spent_s)
    checks = await TestRounds(runner, early_stop=True).judge("", Problem(tests="t"), TestPolicy())  # type: ignore[arg-type]
    assert (len(checks.faults), runner.asked) == (1, rounds)
    assert "answers that depend on answers" in checks.faults[0]
