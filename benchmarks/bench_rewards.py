"""Measure the speed of the rewards: mathematical pairs per second, and test cases of programs per second.

    .venv/bin/python benchmarks/bench_rewards.py --out rewards.json

Rivals in the same run. Math: the same reward, one call after another; and a fresh process for each pair, which is the
simple way to bound hostile LaTeX (for few pairs, because it is slow). Programs: one sandbox run per case, in the same
sandbox and with the same number of parallel runs. Verdicts are checked before measuring.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from timing import environment, interleaved, report

from afm.agents import AgentSpec, load_agent
from afm.rewards import Reward, Sample, load_reward, score_many
from afm.rewards.code_tests import CodeTests
from afm.rewards.code_tests.compare import same_output
from afm.rewards.code_tests.problem import Problem, read_problem
from afm.rewards.code_tests.runner import TestPolicy
from afm.sandbox import ExitReason, Sandbox, open_sandbox
from afm.trajectory import author_segments

FRESH = 4
PROGRAMS = {
    "adds": "a, b = map(int, input().split())\nprint(a + b)",
    "sieves": "n = sum(map(int, input().split()))\ns = [True] * (n + 2)\nfor i in range(2, n + 1):\n"
    "    for j in range(2 * i, n + 1, i): s[j] = False\nprint(n)",
    "counts": "from collections import Counter\nc = Counter(map(int, input().split()))\nprint(sum(k * v for k, v in c.items()))",
}


def pairs(count: int, seed: int) -> list[tuple[str, str, bool]]:
    """Generate (gold, answer, equal): fractions, roots, tuples and integers, half of them wrong."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        a, b, right = draw.randint(2, 60), draw.randint(61, 99), number % 2 == 0
        off = 0 if right else 1
        found.append(
            [
                (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{2 * a + off}}}{{{2 * b}}}", right),
                (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b + off}}}", right),
                (rf"({a}, {b})", rf"\left({a}, {b + off}\right)", right),
                (str(a * b), str(a * b + off), right),
            ][number // 2 % 4]
        )
    return found


def math_sample(spec: AgentSpec, gold: str, answer: str) -> Sample:
    """Return a response of the math agent."""
    response = rf"<plan>p</plan><think>t</think><answer>\boxed{{{answer}}}</answer>"
    return Sample(spec, "math_dapo", "q", author_segments(response, spec), gold)


def fresh_process(gold: str, answer: str) -> bool:
    """Run Math-Verify in a separate process."""
    code = "import sys; from afm.rewards.verifier import algebra_verdict as v; print(v(*sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, gold, answer], capture_output=True, text=True, check=True
    )
    return done.stdout.strip() == "True"


async def one_by_one(reward: Reward, samples: Sequence[Sample]) -> list[float | None]:
    return [(await reward.score(sample)).score for sample in samples]


async def batch(reward: Reward, samples: Sequence[Sample]) -> list[float | None]:
    return [verdict.score for verdict in await score_many(reward, samples)]


def bench_math(
    run: Callable[[Coroutine[Any, Any, Any]], Any], count: int, fresh: int, runs: int, seed: int
) -> dict[str, Any]:
    """Check, then measure; ``fresh`` of the ``count`` pairs get a separate process."""
    spec, reward, made = load_agent("math"), load_reward(), pairs(count, seed)
    samples = [math_sample(spec, gold, answer) for gold, answer, _ in made]
    expected = [float(right) for *_, right in made]
    assert run(batch(reward, samples)) == run(one_by_one(reward, samples)) == expected
    assert [fresh_process(gold, answer) for gold, answer, _ in made[:fresh]] == [
        right for *_, right in made[:fresh]
    ]
    seconds = interleaved(
        {
            "score_many": lambda: run(batch(reward, samples)),
            "one call after another": lambda: run(one_by_one(reward, samples)),
            f"a fresh process a pair, {fresh} pairs": lambda: [
                fresh_process(g, a) for g, a, _ in made[:fresh]
            ],
        },
        runs,
    )
    run(reward.close())
    sizes = [count, count, fresh]
    rates = {
        name: round(size / value["median_s"], 1)
        for (name, value), size in zip(seconds.items(), sizes, strict=True)
    }
    return {"pairs": count, "seconds": seconds, "pairs_per_s": rates, "ratio": _ratios(rates)}


def problem(cases: int, seed: int) -> Problem:
    """Return a problem about sums of two numbers."""
    draw = random.Random(seed)
    numbers = [(draw.randint(1, 900), draw.randint(1, 900)) for _ in range(cases)]
    return read_problem(
        {"stdin": [f"{a} {b}\n" for a, b in numbers], "expected_output": [f"{a + b}\n" for a, b in numbers]}
    )


async def many_a_run(scorer: CodeTests, tested: Problem) -> list[bool]:
    parts = await asyncio.gather(*(scorer.test(program, tested) for program in PROGRAMS.values()))
    return [part.score == 1.0 for part in parts]


async def one_a_run(sandbox: Sandbox, tested: Problem) -> list[bool]:
    async def passes(program: str, stdin: str, expected: str) -> bool:
        result = await sandbox.run(program, stdin)
        return result.reason is ExitReason.OK and same_output(result.stdout, expected, 1e-6)

    async def all_pass(program: str) -> bool:
        cases = [passes(program, case.stdin, case.expected or "") for case in tested.printing]
        return all(await asyncio.gather(*cases))

    return list(await asyncio.gather(*(all_pass(program) for program in PROGRAMS.values())))


def bench_code(
    run: Callable[[Coroutine[Any, Any, Any]], Any], backend: str | None, cases: int, runs: int, seed: int
) -> dict[str, Any]:
    """Check, then measure, in one sandbox."""
    sandbox = open_sandbox(**({"backend": backend} if backend else {}))
    training, evaluation = CodeTests(sandbox, TestPolicy()), CodeTests(sandbox, TestPolicy(early_stop=False))
    tested = problem(cases, seed)
    right = [True] * len(PROGRAMS)
    assert run(many_a_run(training, tested)) == run(one_a_run(sandbox, tested)) == right
    seconds = interleaved(
        {
            "evaluation, many cases a run": lambda: run(many_a_run(evaluation, tested)),
            "training, growing batches": lambda: run(many_a_run(training, tested)),
            "one sandbox run a case": lambda: run(one_a_run(sandbox, tested)),
        },
        runs,
    )
    run(sandbox.close())
    total = cases * len(PROGRAMS)
    rates = {name: round(total / value["median_s"], 1) for name, value in seconds.items()}
    kind = type(sandbox).__name__
    return {
        "sandbox": kind,
        "cases": total,
        "seconds": seconds,
        "cases_per_s": rates,
        "ratio": _ratios(rates),
    }


def _ratios(rates: dict[str, float]) -> dict[str, float]:
    first, *others = rates
    return {f"{first} : {other}": round(rates[first] / rates[other], 2) for other in others}


def main() -> None:
    """Check, measure and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--cases", type=int, default=40, help="test cases of each of the three programs")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", help="sandbox backend (default: that of afm)")
    parser.add_argument(
        "--smoke", action="store_true", help="little work and one run, only to see that it works"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    count, fresh, cases, runs = (
        (16, 1, 4, 1) if given.smoke else (given.pairs, FRESH, given.cases, given.runs)
    )
    with asyncio.Runner() as runner:
        result = {
            "benchmark": "rewards",
            "runs": runs,
            "seed": given.seed,
            "math": bench_math(runner.run, count, fresh, runs, given.seed),
            "code_tests": bench_code(runner.run, given.backend, cases, runs, given.seed),
            "environment": environment(["afm", "math-verify", "sympy"]),
        }
    report(result, given.out)


if __name__ == "__main__":
    main()
