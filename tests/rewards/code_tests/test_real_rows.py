"""Real LiveCodeBench rows with a correct, a wrong, a slow and a crashing program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patient_scorer import PatientScorer

from afm.agents import load_agent
from afm.rewards import Sample
from afm.rewards.code_tests import CodeTests
from afm.rewards.code_tests.runner import TestPolicy
from afm.sandbox import open_sandbox
from afm.trajectory import author_segments

pytestmark = pytest.mark.sandbox

SPEC = load_agent("code")
SOLUTIONS = {
    "abc366_a": "n, t, a = map(int, input().split())\nprint('Yes' if abs(t - a) > n - t - a else 'No')",
    "abc366_b": """
rows = [input() for _ in range(int(input()))][::-1]
for column in range(max(map(len, rows))):
    print(''.join(row[column] if column < len(row) else '*' for row in rows).rstrip('*'))""",
    "abc367_a": """
a, b, c = map(int, input().split())
hour = b
awake = True
while hour != c:
    awake = awake and hour != a
    hour = (hour + 1) % 24
print('Yes' if awake else 'No')""",
    "abc367_b": "print(input().rstrip('0').rstrip('.'))",
    "abc368_a": "n, k = map(int, input().split())\na = input().split()\nprint(*(a[n - k:] + a[:n - k]))",
    "abc368_b": """
input()
a = sorted(map(int, input().split()), reverse=True)
count = 0
while a[1] > 0:
    a[0] -= 1
    a[1] -= 1
    a.sort(reverse=True)
    count += 1
print(count)""",
    "abc369_a": "a, b = map(int, input().split())\nprint(1 if a == b else 2 if (a + b) % 2 else 3)",
    "abc370_a": "l, r = map(int, input().split())\nprint('Invalid' if l == r else 'Yes' if l else 'No')",
    "abc370_b": """
n = int(input())
table = [list(map(int, input().split())) for _ in range(n)]
now = 1
for other in range(1, n + 1):
    now = table[max(now, other) - 1][min(now, other) - 1]
print(now)""",
    "abc371_b": """
n, m = map(int, input().split())
seen = set()
for _ in range(m):
    family, sex = input().split()
    print('Yes' if sex == 'M' and family not in seen else 'No')
    if sex == 'M':
        seen.add(family)""",
    "abc372_a": "print(input().replace('.', ''))",
    "abc373_a": "print(sum(len(input()) == month for month in range(1, 13)))",
    "abc373_b": "s = input()\nprint(sum(abs(s.index(a) - s.index(b)) for a, b in zip('ABCDEFGHIJKLMNOPQRSTUVWXY', 'BCDEFGHIJKLMNOPQRSTUVWXYZ')))",
    "3543": """
class Solution:
    def countKConstraintSubstrings(self, s: str, k: int) -> int:
        parts = [s[i:j] for i in range(len(s)) for j in range(i + 1, len(s) + 1)]
        return sum(min(part.count('0'), part.count('1')) <= k for part in parts)""",
    "3553": """
class Solution:
    def checkTwoChessboards(self, coordinate1: str, coordinate2: str) -> bool:
        return len({(ord(c[0]) + int(c[1])) % 2 for c in (coordinate1, coordinate2)}) == 1""",
    "3555": """
class Solution:
    def getFinalState(self, nums: List[int], k: int, multiplier: int) -> List[int]:
        for _ in range(k):
            nums[nums.index(min(nums))] *= multiplier
        return nums""",
    "3567": """
class Solution:
    def convertDateToBinary(self, date: str) -> str:
        return '-'.join(format(int(part), 'b') for part in date.split('-'))""",
    "3568": """
class Solution:
    def generateKey(self, num1: int, num2: int, num3: int) -> int:
        return int(''.join(map(min, *(str(n).zfill(4) for n in (num1, num2, num3)))))""",
    "3600": """
class Solution:
    def kthCharacter(self, k: int) -> str:
        return chr(ord('a') + (k - 1).bit_count())""",
    "3606": """
class Solution:
    def minElement(self, nums: List[int]) -> int:
        return min(sum(map(int, str(n))) for n in nums)""",
}


@pytest.fixture(scope="module")
def rows(shared: Callable[[str], Path]) -> dict[str, dict[str, Any]]:
    import pyarrow.parquet as pq

    table = pq.read_table(shared("data/code_math/livecodebench_v4.parquet"))
    return {row["extra_info"]["index"]: row for row in table.to_pylist()}


@pytest.fixture(scope="module")
def scorer() -> Iterator[CodeTests]:
    made = PatientScorer(open_sandbox(), TestPolicy(case_s=0.5, early_stop=False))
    yield made
    asyncio.run(made.close())


def sample(program: str, row: dict[str, Any]) -> Sample:
    response = f"<plan>p</plan><think>t</think><answer>```py\n{program}\n```</answer>"
    info = {key: value for key, value in row["extra_info"].items() if value is not None}
    segments = author_segments(response, SPEC)
    return Sample(
        SPEC, row["data_source"], "q", segments, row["reward_model"]["ground_truth"], extra_info=info
    )


def spoilt(program: str) -> dict[str, tuple[str, str]]:
    """Wrong, slow and crashing versions of a program, each with what the verdict says of it."""
    if "class Solution" not in program:
        wrong = f"import builtins\nshow = print\ndef print(*a): show(*a, 'x')\n{program}"
        return {
            "wrong": (wrong, "printed "),
            "slow": (f"{program}\nwhile True: pass", "computed for more than 0.5 s"),
            "crashing": (f"{program}\nraise KeyError('no')", "KeyError: 'no'"),
        }
    function = program.partition("def ")[2].partition("(")[0]
    head = f"{program}\nright = Solution.{function}\ndef new(self, *a):\n    "
    tail = f"\nSolution.{function} = new"
    return {
        "wrong": (f"{head}return (right(self, *a), 'x'){tail}", "AssertionError: Expected "),
        "slow": (f"{head}while True: pass{tail}", "too slow"),
        "crashing": (f"{head}raise KeyError('no'){tail}", "KeyError: 'no'"),
    }


@pytest.mark.parametrize("name", SOLUTIONS)
async def test_a_correct_program_passes_and_spoilt_ones_do_not(
    name: str, rows: dict[str, dict[str, Any]], scorer: CodeTests
) -> None:
    part = await scorer.judge(sample(SOLUTIONS[name], rows[name]))
    assert part.score == 1.0, part.evidence
    for program, words in spoilt(SOLUTIONS[name]).values():
        part = await scorer.judge(sample(program, rows[name]))
        assert part.score == 0.0
        assert words in part.evidence


@pytest.mark.parametrize(
    "program",
    [
        "print(input())",
        "class Solution:\n    def __getattr__(self, name):\n        return lambda *a: a[0]",
        "print(0)",
        "",
    ],
    ids=["copies", "returns its argument", "constant", "empty"],
)
async def test_lazy_programs_pass_nowhere(
    program: str, rows: dict[str, dict[str, Any]], scorer: CodeTests
) -> None:
    assert len(rows) == 100
    parts = await asyncio.gather(*(scorer.judge(sample(program, row)) for row in rows.values()))
    assert [name for name, part in zip(rows, parts, strict=True) if part.score != 0.0] == []
