"""Test programs and the programs they test: who decides what, and which tests decide nothing."""

from __future__ import annotations

from typing import Any

import pytest
from answered import answered
from patient_scorer import PatientScorer

from afm.rewards.base import Part
from afm.rewards.code_tests import CodeTests

pytestmark = pytest.mark.sandbox

POINT = (
    "class P:\n    def __init__(self, a, b): self.key = (a, b)\n"
    "    def __eq__(self, other): return self.key == other.key\n"
    "    def __lt__(self, other): return self.key < other.key\n"
)


async def judged(scorer: CodeTests, tests: str, program: str, **more: Any) -> Part:
    return await scorer.judge(answered("code", "livecodebench", program, {"test": tests} | more))


@pytest.mark.parametrize(
    ("tests", "helper"),
    [
        ("assert Counter(f([1, 1, 2])) == Counter([1, 1, 3])", "def Counter(x): return 1"),
        ("assert isclose(f(2), 3.5)", "def isclose(a, b): return True"),
        ("assert log(f(1), 'gold') or f(1) == 'gold'", "def log(*a): return True"),
        ("assert reduce(add, f([1, 2])) == 7", "def add(*a): return 7\ndef reduce(*a): return 7"),
    ],
)
async def test_helpers_that_tests_do_not_define_are_the_standard_librarys(
    tests: str, helper: str, training: CodeTests
) -> None:
    part = await judged(training, tests, f"{helper}\ndef f(x): return x")
    assert part.score == 0.0, part.evidence


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        ("assert Counter(f([1, 1, 2])) == Counter([2, 1, 1])", "def f(x): return x"),
        ("assert isclose(f(2), sqrt(2))", "def f(x): return x ** 0.5"),
        ("assert sorted(f('ba')) == ['a', 'b']", "def f(x): return dict.fromkeys(x).keys()"),
        (
            "from collections import deque\nd = deque([1, 2])\nf(d)\nassert d == deque([2])",
            "def f(d): d.popleft()",
        ),
        ("assert gcd(12, 18) == 6", "def gcd(a, b): return a if not b else gcd(b, a % b)"),
        ("for n in range(5):\n    assert add(n, 1) == n + 1", "def add(a, b): return a + b"),
        (
            "assert encode('a') == 'b'\nassert decode('b') == 'a'",
            "def encode(x): return 'b'\ndef decode(x): return 'a'",
        ),
        ("from fractions import *\nassert f(2) == Fraction(4, 2)", "def f(x): return x"),
    ],
)
async def test_and_honest_programs_pass_with_them(tests: str, program: str, training: CodeTests) -> None:
    part = await judged(training, tests, program)
    assert part.score == 1.0, part.evidence


@pytest.mark.parametrize(
    ("tests", "entry", "words"),
    [
        ("assert approx(f(2), 5)", None, "'approx' and 'f'"),
        ("got = f(2)\nassert approx(got, 5)", None, "'approx' and 'f'"),
        ("close = approx\nassert close(f(2), 5)", None, "'approx' and 'f'"),
        ("assert Checker().same(f(2), 5)", None, "'Checker' and 'f'"),
        ("c = checker()\nassert c.same(f(2), 5)", None, "'checker' and 'f'"),
        ("assert approx(Solution().f(2), 5)", None, "'Solution' and 'approx'"),
        ("assert approx(f(2), 5)", "f", "'approx'"),
        ("def check(candidate):\n    assert approx(candidate(2), 5)", "f", "'approx'"),
        (
            "def check(candidate):\n    try:\n        assert approx(candidate(2), 5)\n    except:\n        pass",
            "f",
            "'approx'",
        ),
    ],
)
async def test_tests_that_let_the_program_compare_abstain(
    tests: str, entry: str | None, words: str, training: CodeTests
) -> None:
    program = (
        "def approx(a, b): return True\nclass Checker:\n    def same(self, a, b): return True\n"
        "def checker(): return Checker()\ndef f(x): return 0\nclass Solution:\n    f = lambda self, x: 0"
    )
    part = await judged(training, tests, program, **({"entry_point": entry} if entry else {}))
    assert part.score is None, part.evidence
    assert words in part.evidence


async def test_with_a_named_function_the_others_are_helpers(training: CodeTests) -> None:
    tests = "def check(candidate):\n    assert isclose(candidate(4), 2) and Counter([candidate(1)])[1] == 1"
    honest = "def f(x): return x ** 0.5"
    assert (await judged(training, tests, honest, entry_point="f")).score == 1.0
    assert (
        await judged(training, tests, "def isclose(a, b): return True\ndef f(x): return 1", entry_point="f")
    ).score == 0


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        (
            "data = [3, 1, 2]\nassert f(data) == [2 * x for x in data]",
            "def f(x):\n    x.clear()\n    return []",
        ),
        ("data = {1: 2}\nassert f(data) == len(data)", "def f(x):\n    x.clear()\n    return 0"),
        ("for l in ([1, 2], [4, 5]):\n    assert f(l) == sum(l)", "def f(x):\n    x[:] = [0]\n    return 0"),
        (
            "data = [3, 1]\nprint(f(data))\nassert f(data) == sorted(data)",
            "def f(x):\n    x.clear()\n    return x",
        ),
    ],
)
async def test_an_expectation_is_made_of_the_arguments_as_they_were(
    tests: str, program: str, training: CodeTests
) -> None:
    part = await judged(training, tests, program)
    assert part.score == 0.0, part.evidence


@pytest.mark.parametrize(
    "program",
    [
        "def f(x): x.sort()",
        "def f(x):\n    x.sort()\n    return x",
        "def f(x):\n    x.sort()\n    return True",
    ],
)
@pytest.mark.parametrize(
    "tests",
    [
        "a = [3, 1]\nf(a)\nassert a == [1, 3]",
        "def t():\n    a = [3, 1]\n    f(a)\n    assert a == [1, 3]\nt()",
    ],
)
async def test_work_in_place_is_seen_where_the_value_is_not_used(
    tests: str, program: str, training: CodeTests
) -> None:
    assert (await judged(training, tests, program)).score == 1.0
    assert (await judged(training, tests, program.replace("x.sort()", "sorted(x)"))).score == 0.0


async def test_a_program_may_change_its_arguments(training: CodeTests) -> None:
    tests = "import random\nfor n in range(9):\n    l = [random.random() for _ in range(n)]\n    assert f(l) == sum(l)"
    program = "def f(x):\n    total = 0\n    while x: total = x.pop() + total\n    return total"
    reversed_sum = tests.replace("sum(l)", "sum(l[::-1])")
    assert (await judged(training, reversed_sum, program)).score == 1.0


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
    part = await judged(
        training, tests, "def f(x): return 4\nclass Stack:\n    def push(self, x): pass\n    pop = push"
    )
    assert (part.score, part.evidence) == (None, "tests: no wrong answer can fail them")


@pytest.mark.parametrize(
    "tests",
    [
        "assert not f(2)",
        "if f(2) != 5:\n    raise SystemExit(1)",
        "if f(2) == 5:\n    pass\nelse:\n    raise ValueError('wrong')",
        "for x in f(2):\n    assert x == 5",
        "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "assert all(f(n) == n for n in range(9))",
        "import unittest\nunittest.TestCase().assertEqual(f(2), 5)",
    ],
)
async def test_tests_that_some_answer_fails_decide(tests: str, training: CodeTests) -> None:
    assert (await judged(training, tests, "def f(x): return 4")).score == 0.0


@pytest.mark.parametrize("swallow", ["except:", "except BaseException:"])
async def test_a_crash_is_no_exception_that_tests_expect(swallow: str, training: CodeTests) -> None:
    tests = f"try:\n    f(-1)\n{swallow}\n    pass\nassert f(1) == 1"
    crash = "import os\ndef f(x):\n    if x < 0: os._exit(0)\n    return x"
    part = await judged(training, tests, crash)
    assert part.score == 0.0, part.evidence
    assert (
        await judged(training, tests, "def f(x):\n    if x < 0: raise OSError\n    return x")
    ).score == 1.0


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        ("assert P(1, 2) == P(1, 2)\nassert P(1, 2) != P(2, 2)", POINT),
        ("assert P(1, 2) < P(2, 2)", POINT),
        ("assert P(1, 2) in [P(2, 1), P(1, 2)]", POINT),
        ("assert P(1, 2) + P(1, 2) == 3", POINT),
    ],
)
async def test_what_two_objects_of_the_program_are_to_each_other_is_not_judged(
    tests: str, program: str, training: CodeTests
) -> None:
    part = await judged(training, tests, program)
    assert part.score is None
    assert "the tests relate two objects of the program" in part.evidence


@pytest.mark.parametrize(
    "tests",
    [
        "assert sorted([f(2), f(1)]) == [1, 2]",
        "assert f(f(1)) == 1",
        "assert f(f(1).left) == 1",
    ],
)
async def test_an_object_in_place_of_a_value_is_wrong(tests: str, training: CodeTests) -> None:
    part = await judged(training, tests, "class A:\n    left = print\ndef f(x): return A()")
    assert part.score == 0.0, part.evidence
    assert (await judged(training, "assert f(f(1)) == 1", "def f(x): return x")).score == 1.0


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


async def test_iterators_of_programs_still_end(training: CodeTests) -> None:
    tests = "it = f(2)\nassert next(it) == 0 and next(it) == 1\ntry:\n    next(it)\n    assert False\nexcept StopIteration:\n    pass"
    assert (await judged(training, tests, "def f(x): return iter(range(x))")).score == 1.0


@pytest.mark.parametrize(
    ("caught", "raised", "score"),
    [
        ("ValueError", "type('Mine', (ValueError,), {})('x')", 1),
        ("SystemExit", "SystemExit(0)", 1),
        ("KeyError", "type('Mine', (ValueError,), {})('x')", 0),
    ],
)
async def test_tests_catch_the_class_that_was_raised(
    caught: str, raised: str, score: int, training: CodeTests
) -> None:
    tests = f"try:\n    f(1)\n    assert False, 'nothing raised'\nexcept {caught}:\n    pass"
    assert (await judged(training, tests, f"def f(x): raise {raised}")).score == score


@pytest.mark.parametrize(
    "tests",
    [
        "try:\n    f(1)\nexcept Mine:\n    pass\nassert f(2) == 2",
        "assert isinstance(f(1), Mine)",
        "kind = Mine\nassert isinstance(f(1), kind)",
        "import unittest\nunittest.TestCase().assertRaises(Mine, f, 1)",
    ],
)
@pytest.mark.parametrize("program", ["Mine = TypeError\ndef f(x): raise Mine", ""])
async def test_tests_that_need_a_class_of_the_program_abstain_whatever_it_does(
    tests: str, program: str, training: CodeTests
) -> None:
    part = await judged(training, tests, program or "pass", entry_point="f")
    assert part.score is None, part.evidence


@pytest.mark.parametrize("kind", ["TypeError", "ValueError"])
async def test_the_words_of_an_exception_decide_nothing(kind: str, training: CodeTests) -> None:
    tests = "try:\n    f(1)\nexcept ValueError:\n    pass\nassert f(2) == 2"
    for words in (
        "catching classes that do not inherit from BaseException",
        "isinstance() arg 2 must be a type",
    ):
        part = await judged(training, tests, f"def f(x): raise {kind}({words!r})")
        assert part.score == 0.0, part.evidence


async def test_a_value_that_was_never_made_is_no_helper_that_is_missing(training: CodeTests) -> None:
    tests = "got = f(1)\nassert got == 1\nassert got > 0\nassert got < 9"
    part = await judged(training, tests, "def f(x): raise OSError")
    assert part.score == 0.0, part.evidence


@pytest.mark.parametrize(
    ("tests", "score"),
    [
        ("assert f(3).has(3)", 0),
        ("assert f(3).has(x=3) == True", 0),
        ("assert f(3).has(3)\nassert not f(3).has(4)", 1),
        ("box = f(3)\nbox.put(4)\nassert box.has(4) and not box.has(5)\nassert box.less(1) == 2", 1),
        ("box = Box(3)\nassert box.has(3)", 1),
    ],
)
async def test_a_method_that_only_agrees_proves_nothing(tests: str, score: int, training: CodeTests) -> None:
    program = (
        "class Box:\n    def __init__(self, x): self.x = {x}\n    def has(self, x): return x in self.x\n"
        "    def put(self, x):\n        self.x.add(x)\n        return True\n    def less(self, n): return len(self.x) - n + 1\n"
        "f = lambda x: Box(x)"
    )
    part = await judged(training, tests, program)
    assert part.score == score, part.evidence


@pytest.mark.parametrize(
    "tests",
    [
        "assert not abs(float(f(7)[0]) - 14) > 1e-6",
        "assert f(7) != 15\nassert max(0.0, abs(f(7) - 14)) < 1e-6",
        "assert not abs(float(str(f(7))) - 14) >= 1e-6",
    ],
)
async def test_what_is_no_number_is_wrong(tests: str, training: CodeTests) -> None:
    listed = "[{}]" if "[0]" in tests else "{}"
    for value, score in (("float('nan')", 0), ("'nan'", 0), ("14.0", 1)):
        part = await judged(training, tests, f"def f(x): return {listed.format(value)}")
        assert part.score == score, part.evidence


async def test_unless_the_tests_ask_for_it(training: CodeTests) -> None:
    tests = "import math\nassert math.isnan(f(0)) and not f(0) > 1\nassert f(1) == 1"
    assert (await judged(training, tests, "def f(x): return 1 if x else float('nan')")).score == 1.0


@pytest.mark.parametrize(("body", "score"), [("n // 2", 1), ("n + 1", 0), ("n", 0)])
async def test_answers_that_depend_on_answers(body: str, score: int, training: CodeTests) -> None:
    tests = "n = 2 ** 5\nwhile n > 1:\n    n = f(n)\nassert n == 1"
    short = PatientScorer(training._sandbox, training._policy.within(total_s=5))
    part = await judged(short, tests, f"def f(n): return {body}")
    assert part.score == score, part.evidence


async def test_an_object_is_still_itself_and_no_value(training: CodeTests) -> None:
    assert (
        await judged(training, "p = P(1, 2)\nassert p == p and p != 3 and p is not None", POINT)
    ).score == 1.0
    assert (await judged(training, "assert P(1, 2) == (1, 2)", POINT)).score == 0.0
