"""Real LiveCodeBench rows with a correct, a wrong, a slow and a crashing program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answered import answered
from patient_scorer import PatientScorer

from afm.rewards import Sample
from afm.rewards.code_tests import CodeTests
from afm.rewards.code_tests.runner import TestPolicy
from afm.sandbox import Sandbox

pytestmark = pytest.mark.sandbox

SOLUTIONS = {
    "abc367_b": "print(input().rstrip('0').rstrip('.'))",
    "abc371_b": """
n, m = map(int, input().split())
seen = set()
for _ in range(m):
    family, sex = input().split()
    print('Yes' if sex == 'M' and family not in seen else 'No')
    if sex == 'M':
        seen.add(family)""",
    "3543": """
class Solution:
    def countKConstraintSubstrings(self, s: str, k: int) -> int:
        parts = [s[i:j] for i in range(len(s)) for j in range(i + 1, len(s) + 1)]
        return sum(min(part.count('0'), part.count('1')) <= k for part in parts)""",
    "3555": """
class Solution:
    def getFinalState(self, nums: List[int], k: int, multiplier: int) -> List[int]:
        for _ in range(k):
            nums[nums.index(min(nums))] *= multiplier
        return nums""",
}


@pytest.fixture(scope="module")
def rows(shared: Callable[[str], Path]) -> dict[str, dict[str, Any]]:
    import pyarrow.parquet as pq

    table = pq.read_table(shared("data/code_math/livecodebench_v4.parquet"))
    return {row["extra_info"]["index"]: row for row in table.to_pylist()}


@pytest.fixture(scope="module")
def scorer(shared_sandbox: Sandbox) -> CodeTests:
    return PatientScorer(shared_sandbox, TestPolicy(case_s=1.0, early_stop=False))


def sample(program: str, row: dict[str, Any]) -> Sample:
    info = {key: value for key, value in row["extra_info"].items() if value is not None}
    gold = row["reward_model"]["ground_truth"]
    return answered("code", row["data_source"], program, gold, extra_info=info)


def spoilt(program: str) -> dict[str, tuple[str, str]]:
    """Wrong, slow and crashing versions of a program, each with the words of its verdict."""
    if "class Solution" not in program:
        wrong = f"import builtins\nshow = print\ndef print(*a): show(*a, 'x')\n{program}"
        return {
            "wrong": (wrong, "printed "),
            "slow": (f"{program}\nwhile True: pass", "computed for more than 1 s"),
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    ["print(input())", "class Solution:\n    def __getattr__(self, name):\n        return lambda *a: a[0]"],
    ids=["copies", "returns its argument"],
)
async def test_lazy_programs_pass_nowhere(
    program: str, rows: dict[str, dict[str, Any]], scorer: CodeTests
) -> None:
    assert len(rows) == 100
    parts = await asyncio.gather(*(scorer.judge(sample(program, row)) for row in rows.values()))
    assert [name for name, part in zip(rows, parts, strict=True) if part.score != 0.0] == []
