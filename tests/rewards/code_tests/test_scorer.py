"""Programs judged by cases, test programs and checkers, in the real sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from answered import answered
from busy_core import busy_core, pinned
from patient_scorer import PatientScorer

from afm.agents import load_agent
from afm.errors import ConfigError, SandboxError
from afm.rewards import Sample, load_reward
from afm.rewards.base import Part
from afm.rewards.code_tests import CodeTests
from afm.rewards.code_tests.runner import TestPolicy
from afm.sandbox import RunResult, Sandbox, SandboxLimits, open_sandbox
from afm.trajectory import author_segments

pytestmark = pytest.mark.sandbox

SPEC = load_agent("code")
SUMS = {"stdin": ["1 2\n", "3 4\n"] * 5, "expected_output": ["3\n", "7\n"] * 5}
ADD = "a, b = map(int, input().split())\nprint(a + b)"


def sample(program: str, truth: Any = SUMS, **info: Any) -> Sample:
    return answered("code", "livecodebench", program, truth, extra_info=info)


@pytest.mark.parametrize(
    "program",
    [
        ADD,
        "import sys\ndata = sys.stdin.buffer.read().split()\nsys.stdout.write(str(int(data[0]) + int(data[1])))",
        "import os\nos.write(1, b'%d' % sum(map(int, os.read(0, os.fstat(0).st_size).split())))",
        "print(sum(map(int, open(f'/dev/stdin').read().split())))",
        "import os\nprint(sum(map(int, os.read(os.open('/dev/stdin', os.O_RDONLY), 99).split())))",
        "if __name__ == '__main__':\n    print(sum(map(int, input().split())))\n    exit()",
        "import atexit\natexit.register(lambda: print(total))\ntotal = sum(map(int, input().split()))",
        "def down(n):\n    return n and 1 + down(n - 1)\nimport sys\nsys.setrecursionlimit(9999)\ndown(9000)\n"
        + ADD,
    ],
)
async def test_right_programs_pass(program: str, scorer: CodeTests) -> None:
    part = await scorer.judge(sample(program))
    assert (part.score, part.evidence) == (1.0, "10/10 cases pass")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("1 / 0", "the program failed: ZeroDivisionError: division by zero (line 1)"),
        (f"{ADD}\nexit(3)", "the program failed: exit status 3"),
        ("x = (", "the program failed: SyntaxError: '(' was never closed (line 1)"),
        ("print('x' * 10**6)", "more than 65536 bytes of output"),
        ("import os\nos.abort()", "the program failed: died of signal 6"),
        ("x = [0] * 10**10", "the program failed: MemoryError (line 1)"),
        ("\0", "the program failed: "),
    ],
)
async def test_programs_that_fail_say_why(
    program: str, words: str, training: CodeTests, evaluation: CodeTests
) -> None:
    for scorer, head in ((training, "case 1 of 10 fails"), (evaluation, "0/10 cases pass; case 1")):
        part = await scorer.judge(sample(program))
        assert part.score == 0.0
        assert part.evidence.startswith(f"{head}: {words}")


async def test_wrong_outputs_and_no_program_fail(training: CodeTests, evaluation: CodeTests) -> None:
    words = "printed '3', expected '7', for the input '3 4'"
    assert await training.judge(sample("print(3)")) == Part(0.0, f"case 2 of 10 fails: {words}")
    assert await evaluation.judge(sample("print(3)")) == Part(0.0, f"5/10 cases pass; case 2: {words}")
    assert await training.judge(sample("")) == Part(0.0, "the response has no final program")


@pytest.mark.slow
async def test_a_slow_case_fails_alone(evaluation: CodeTests) -> None:
    program = f"{ADD}\nwhile a == 3: pass"
    part = await evaluation.judge(sample(program, {"stdin": ["1 2", "3 4"], "expected_output": ["3", "7"]}))
    assert (part.score, part.evidence) == (0.0, "1/2 cases pass; case 2: computed for more than 1 s")


@pytest.mark.slow
async def test_sleeping_counts_by_the_clock(training: CodeTests) -> None:
    part = await training.judge(sample("import time\ntime.sleep(60)"))
    assert part.evidence == "case 1 of 10 fails: lasted more than 3 s"


class CountingSandbox:
    """The real sandbox, with the number of its runs."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.runs = 0

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        self.runs += 1
        return await self._sandbox.run(code, stdin, limits)

    async def close(self) -> None:
        """Do nothing. The owner closes the other sandbox."""


@pytest.mark.parametrize(
    ("program", "early_stop", "runs"),
    [
        ("print(3)", True, 1),  # wrong from the second case on: the first batch is enough
        (ADD, True, 3),  # 4, 16 and 20 cases
        (ADD, False, 1),
    ],
)
async def test_few_runs_for_many_cases(
    program: str, early_stop: bool, runs: int, training: CodeTests
) -> None:
    sandbox = CountingSandbox(training._sandbox)
    scorer = PatientScorer(sandbox, training._policy.within(early_stop=early_stop))
    truth = {"stdin": ["1 2", "3 4"] * 20, "expected_output": ["3", "7"] * 20}
    assert (await scorer.judge(sample(program, truth))).score == (program == ADD)
    assert sandbox.runs == runs


async def test_a_group_of_programs_shares_the_first_round_of_its_tests(training: CodeTests) -> None:
    sandbox = CountingSandbox(training._sandbox)
    scorer = PatientScorer(sandbox, training._policy)
    for program, score in (("def f(x): return x", 1), ("def f(x): return 2", 0), ("def f(x): return 1", 1)):
        assert (await scorer.judge(sample(program, {"test_list": ["assert f(1) == 1"]}))).score == score
    assert sandbox.runs == 1 + 2 * 3


def asked(stdin: list[str], *expected: str) -> dict[str, list[str]]:
    """Cases with standard input."""
    return {"stdin": stdin, "expected_output": list(expected)}


ORPHAN = """
import os, time
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        begun = time.process_time()
        while time.process_time() - begun < {seconds}: pass
        os.write(writing, b"3")
    os._exit(0)
os.wait()
print(os.read(reading, 1).decode())
"""
WORKS_ON = """
import os, time
if input() == "2":
    time.sleep(0.5)
    print(os.listdir("/tmp"))
else:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(0.3)
            open("/tmp/done", "w").close()
        os._exit(0)
    os.wait()
    print("first")
"""
READ = "import os\npath = '/dev/stdin'\nprint(open(path).read())\nos.unlink(path)\n"
LOOK = "import os\nx = input()\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'))\n"
DEEP = "p = '/tmp' + '/d' * 60\nos.makedirs(p)\nopen(p + '/f', 'w').write(x)"
CLOSED = (
    "os.makedirs('/dev/shm/a/b')\nopen('/dev/shm/a/b/f', 'w').write(x)\n"
    "os.chmod('/dev/shm/a/b', 0)\nos.chmod('/dev/shm/a', 0)"
)
EMPTY = asked(["1", "2", "3"], *["[] []"] * 3)
COPY = asked(["7\n", "21\n"], "7\n", "21\n")
NUMBERS = " ".join(map(str, range(400_000)))
LAYOUT = asked(["1.012\n", "12.340\n", "99.900\n", "0.000\n"], "1.012\n", "12.34\n", "99.9\n", "0\n")
TINY = asked(["0.05\n", "0.01\n"], "0.0000003125\n", "1e-10\n")
TINY_CALLS = {"fn_name": "f", "inputs": [[0.05], [0.01]], "outputs": [3.125e-7, 1e-10]}
CHECKED = {
    "inputs": ["10", "7"],
    "checker": """
import sys
given, expected, output = (open(path).read().split() for path in sys.argv[1:])
numbers = [int(word) for word in output]
print(1 if len(numbers) == 2 and sum(numbers) == int(given[0]) else 0)
""",
}
VERDICTS: dict[str, list[tuple[float, str, Any]]] = {
    "cases share nothing": [
        (1, "import math\nprint(hasattr(math, 'x') or 'no')\nmath.x = 1", asked([""] * 10, *["no"] * 10)),
    ],
    "what one case left is not the next one's input": [
        (1, f"{READ}os.mkdir(path)", asked(["1", "2"], "1", "2")),
    ],
    "a case finds no files of another": [
        (1, LOOK + DEEP, EMPTY),
        (1, LOOK + CLOSED, EMPTY),
        (1, f"{LOOK}os.symlink('/usr', '/tmp/link')\nopen('/tmp/.f', 'w').write(x)", EMPTY),
    ],
    "the time of orphans counts": [
        (score, ORPHAN.replace("{seconds}", seconds), asked([""], "3"))
        for seconds, score in (("1.5", 0), ("0.1", 1))
    ],
    "nobody works on after a case": [(1, WORKS_ON, asked(["1", "2"], "first", "[]"))],
    "inputs and outputs are large": [(1, "print(input())", asked([NUMBERS, "é€\n"], NUMBERS, "é€"))],
    "copying the input is no answer where layout is the task": [
        (0, "print(input())", LAYOUT),
        (1, "s = input().rstrip('0')\nprint(s.rstrip('.'))", LAYOUT),
    ],
    "zeros are no answer where all numbers are tiny": [
        (1, "x = float(input())\nprint(x ** 5)", TINY),
        (0, "input()\nprint(0)", TINY),
        (1, "def f(x): return x ** 5", TINY_CALLS),
        (0, "def f(x): return 0", TINY_CALLS),
    ],
    "what Python prints at the very end counts": [
        (1, "import math\nmath.out = open(1, 'wb', closefd=False)\nmath.out.write(input().encode())", COPY),
        (1, "class A:\n    x = input()\n    def __del__(self): print(self.x)\na = A()", COPY),
        (0, "import os\nprint(input(), end='')\nos.close(1)", COPY),  # it cannot be written
    ],
    "a checker decides where many answers are right": [
        (1, "n = int(input())\nprint(1, n - 1)", CHECKED),
        (0, "print(5, 5)", CHECKED),
        (0, "print()", CHECKED),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("promise", VERDICTS)
async def test_verdicts(promise: str, scorer: CodeTests) -> None:
    for score, program, truth in VERDICTS[promise]:
        part = await scorer.judge(sample(program, truth))
        assert part.score == score, (program, part.evidence)


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        ({"inputs": ["1"], "checker": "def ("}, "the row's checker is not a program: SyntaxError"),
        ({"question_id": "x"}, "the row has no tests"),
    ],
)
async def test_a_row_that_cannot_judge_abstains(
    truth: dict[str, Any], words: str, training: CodeTests
) -> None:
    part = await training.judge(sample("print(1)", truth))
    assert part.score is None
    assert words in part.evidence


WORKERS = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.{handling})
begun = time.monotonic()
for _ in range(6):
    reading, writing = os.pipe()
    if os.fork() == 0:
        while time.process_time() < {seconds}: pass
        os._exit(0)
    os.close(writing)
    os.read(reading, 1)
print(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("handling", ["SIG_IGN", "SIG_DFL"])
async def test_the_time_of_workers_that_nobody_waits_for_counts(handling: str) -> None:
    patient = PatientScorer(open_sandbox(), TestPolicy(case_s=0.1))
    programs = [WORKERS.format(handling=handling, seconds=seconds) for seconds in ("0.05", "0.001")]
    words = [(await patient.judge(sample(program, asked([""], "3")))).evidence for program in programs]
    await patient.close()
    assert words == ["case 1 of 1 fails: computed for more than 0.1 s", "1/1 cases pass"]


async def test_files_that_cannot_be_removed_end_the_run(evaluation: CodeTests) -> None:
    program = "import os\nprint(1)\nfor n in range(50):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)"
    part = await evaluation.judge(sample(program, asked(["", ""], "1", "1")))
    assert part.score == 0.0
    assert part.evidence.startswith("1/2 cases pass; case 2: not finished")


CALLS = [
    {"input": "[1, 2]\n3", "output": "6", "testtype": "functional"},
    {"input": "[]\n0", "output": "0", "testtype": "functional"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("class Solution:\n    def f(self, a: List[int], b): return sum(a) + b", "2/2 cases pass"),
        ("def f(a, b):\n    print('noise')\n    return sum(a, b)", "2/2 cases pass"),
        ("def g(a, b): return 6", "case 1 of 2 fails: NameError: name 'f' is not defined"),
        ("def f(a, b): return lambda: 6", "case 1 of 2 fails: returned an object of type function"),
        ("def f(a, b): raise KeyError('x')", "case 1 of 2 fails: KeyError: 'x' (line 1)"),
        ("def f(a, b): return 10**5000", "case 1 of 2 fails: returned 'a huge number', expected '6'"),
        ("def f(a, b):\n    while True: pass", "case 1 of 2 fails: computed for more than 1 s"),
        ("def f(a, b):\n    x = []\n    x.append(x)\n    return x", "case 1 of 2 fails: "),
    ],
)
async def test_function_calls(program: str, words: str, training: CodeTests) -> None:
    part = await training.judge(sample(program, CALLS, metadata='{"func_name": "f"}'))
    assert words in part.evidence
    assert part.score == ("cases pass" in words)


STACK = """
class Stack:
    def __init__(self):
        self.items, self.size = [], 0
    def push(self, item):
        self.items.append(item); self.size += 1
    def pop(self):
        self.size -= 1
        return self.items.pop()
    def __eq__(self, other):
        return True
    def __len__(self):
        return self.size
    def __str__(self):
        return f"<{self.size}>"
    def __getitem__(self, index):
        return self.items[index]
    def __contains__(self, item):
        return item in self.items
"""


@pytest.mark.parametrize(
    ("tests", "program", "passes"),
    [
        (["assert f(1) == 2", "assert f(2) == 3"], "def f(x): return x + 1", True),
        (["assert f(1) == 2", "assert f(2) == 3"], "def f(x): return 2", False),
        (["s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and s.size == s.items[0]"], STACK, True),
        (["s = Stack()\nassert s == 5"], STACK, False),
        (["s = Stack()\ns.push(7)", "assert s[0] == 7 * len(s) and str(s) == '<1>' and 7 in s"], STACK, True),
        (["add = adder(5)", "assert add(3) == 8"], "def adder(n): return lambda m: n + m", True),
        (["def g(x):\n    return f(x)\nassert g(f(1)) == 3"], "def f(x): return x + 1", True),
        (["x = f(1)\nassert x == 1", "x = f(2)\nassert x == 1"], "def f(x): return [1][x - 1]", False),
    ],
)
async def test_test_programs(tests: list[str], program: str, passes: bool, scorer: CodeTests) -> None:
    assert (await scorer.judge(sample(program, {"test_list": tests}))).score == passes


async def test_every_check_is_counted_in_evaluation(evaluation: CodeTests) -> None:
    tests = [f"assert f({n}) == {n}" for n in range(10)]
    part = await evaluation.judge(sample("def f(n): return n % 7", {"test_list": tests}))
    assert part.evidence == "7/10 cases pass; case 8: AssertionError:  in `assert f(7) == 7`"


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ("def check(f): pass", "the tests never call the program"),
        ("assert (", "the tests are not valid Python"),
        ("assert f(lambda x: x) == 1", "the tests pass an object of type 'function' to 'f'"),
        ("import os\nos._exit(3)", "the test program ended with error"),
    ],
)
async def test_tests_that_cannot_judge_abstain(tests: str, words: str, training: CodeTests) -> None:
    part = await training.judge(sample("def f(x): return 1", {"functional": tests}))
    assert part.score is None
    assert words in part.evidence


class BrokenSandbox:
    """A sandbox that fails."""

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        raise SandboxError("the pool is gone")

    async def close(self) -> None:
        """Nothing to end."""


@pytest.mark.parametrize("truth", [SUMS, {"test_list": ["assert f(1)"]}])
async def test_a_failing_sandbox_abstains(truth: Any) -> None:
    part = await CodeTests(BrokenSandbox()).judge(sample(ADD, truth))
    assert (part.score, part.evidence) == (None, "sandbox: the pool is gone")


async def test_a_limit_beyond_the_sandboxs_is_named() -> None:
    reward = load_reward({"code_tests": {"memory_bytes": 1 << 45}})
    with pytest.raises(ConfigError, match="sandbox limits: memory_bytes: got"):
        await reward.score(sample(ADD))
    await reward.close()


async def test_through_the_reward_file() -> None:
    reward = load_reward({"code_tests": {"early_stop": False, "sandbox": {"max_parallel": 1}}})
    verdict = await reward.score(sample(ADD))
    assert (verdict.score, verdict.parts) == (1.0, {"correct": 1.0, "format": 1.0})
    prose = replace(sample(ADD), segments=author_segments(f"<think>t</think><answer>{ADD}</answer>", SPEC))
    assert (await reward.score(prose)).parts == {"correct": 0.0, "format": 0.0}
    await reward.close()


@pytest.fixture
async def starving() -> AsyncIterator[CodeTests]:
    """A scorer whose programs get an eighth of a core: a second of CPU time takes them eight, and three are allowed."""
    with pinned():
        scorer = CodeTests(open_sandbox(), TestPolicy(case_s=1.0))
        assert (await scorer.judge(sample(ADD))).score == 1.0
    with busy_core():
        yield scorer
    await scorer.close()


SLOW = "import time\nwhile time.process_time() < 0.9: pass\n"
ONE = {"stdin": ["1 2\n"], "expected_output": ["3\n"]}


@pytest.mark.slow
async def test_a_program_that_the_machine_starves_is_not_wrong(starving: CodeTests) -> None:
    part = await starving.judge(sample(SLOW + ADD, ONE))
    assert part.score is None
    assert part.evidence.startswith("sandbox: the machine is overloaded: a program waited")


@pytest.mark.slow
async def test_what_was_wrong_before_the_machine_starved_the_program_is_wrong(starving: CodeTests) -> None:
    truth = asked(["1 2\n", "3 4\n"], "4\n", "7\n")
    program = f"a, b = map(int, input().split())\nif a == 3:\n    {SLOW.replace(chr(10), chr(10) + '    ')}\nprint(a + b)"
    part = await starving.judge(sample(program, truth))
    assert (part.score, part.evidence[:21]) == (0.0, "case 1 of 2 fails: pr")
