"""The math reward on hostile answers and on real benchmark rows."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from answered import answered

from afm.rewards import Sample, load_reward
from afm.rewards.base import Part
from afm.rewards.equality import quick_verdict
from afm.rewards.math import MathVerify
from afm.rewards.verifier import algebra_verdict

ENDLESS = "9^{9^{9^{9^{9^{9}}}}}"
BENCHMARKS = ("aime24", "aime25", "amc23", "math500")


def sample(answer: str, gold: Any, source: str = "math_dapo") -> Sample:
    return answered("math", source, answer, gold)


async def compared(verifier: MathVerify, gold: str, answer: str, question: str = "") -> Part:
    return await verifier.compare((gold,), (answer,), question)


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerify]:
    made = MathVerify(cpu_s=0.8, workers=1)
    yield made
    asyncio.run(made.close())


async def test_easy_pairs_need_no_worker() -> None:
    verifier = MathVerify()
    assert (await verifier.judge(sample(r"\boxed{204}", "204"))).score == 1.0
    assert (await verifier.judge(sample(r"\boxed{205}", "204"))).score == 0.0
    assert verifier._pool is None


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        (r"\boxed{1} no, \boxed{2}", "2", 1.0),  # the last box counts
        (r"\boxed{2} no, \boxed{1}", "2", 0.0),
        (r"\boxed{\frac12}", {"target": ["3", "0.5"]}, 1.0),  # any of several gold answers will do
        (r"\boxed{\frac13}", ["3", "0.5"], 0.0),
        (r"\boxed{1}", None, None),
    ],
)
async def test_boxes_and_gold_answers(
    answer: str, gold: Any, score: float | None, verifier: MathVerify
) -> None:
    assert (await verifier.judge(sample(answer, gold))).score == score


@pytest.mark.parametrize("answer", ["", "204", "I give up", r"\boxed{}", r"\boxed{204"])
async def test_no_boxed_answer_is_wrong(answer: str, verifier: MathVerify) -> None:
    part = await verifier.judge(sample(answer, "204"))
    assert (part.score, part.evidence) == (0.0, "the response has no final answer")


@pytest.mark.parametrize(
    ("gold", "answer", "score"),
    [
        (r"\frac{1}{2}x", r"\frac{x}{2}", 1),
        (r"y=\frac12x", r"y=\frac{x}{2}", 1),
        ("2x", r"2 \cdot x", 1),
        ("5r^5", r"5 \cdot r^5", 1),
        ("(10,100)", "(10, 100)", 1),
        ("(2,500)", r"\left(2, 500\right)", 1),
        ("(5,120)", "x=5, y=120", 1),
        ("18 inches", "18", 1),
        (r"15\mbox{ cm}^2", "15", 1),
        (r"4\sqrt{2}", r"4\sqrt{2}\text{ m}", 1),
        ("5120", "(5,120)", 0),
        *((f"4{letter}", "4", 0) for letter in "cdghlmostxkn"),
        ("4t", "t=4", 0),
        ("4t", "4s", 0),
        ("6ab", "6", 0),
        (r"4\sqrt{2}m", r"4\sqrt2", 0),
        *(
            ("12", f"12 {word}", 0)
            for word in ("millions", "bn", "dozens", "thirteen", "factorials", "versus 13")
        ),
        ("12", "12 apples", 1),
    ],
)
async def test_letters_of_a_gold_answer_are_variables_and_words_are_units(
    gold: str, answer: str, score: float, verifier: MathVerify
) -> None:
    assert (await verifier.compare((gold,), (answer,), "")).score == score


async def test_copying_a_formula_of_the_question_does_not_pay(verifier: MathVerify) -> None:
    simplify = replace(sample(r"\boxed{\sqrt{242}}", r"11\sqrt2"), question=r"Simplify $\sqrt{242}$.")
    part = await verifier.judge(simplify)
    assert part.score == 0.0
    assert part.evidence == r"'\\sqrt{242}' is not '11\\sqrt2' (copied from the question)"
    assert (await verifier.judge(replace(simplify, question="How long is the diagonal?"))).score == 1.0
    given = replace(sample(r"\boxed{60}", r"60^\circ"), question=r"Find the angle, if $A = 60^\circ$.")
    assert (await verifier.judge(given)).score == 1.0
    both = replace(simplify, ground_truth=[r"11\sqrt2", r"\sqrt{242}"])
    assert (await verifier.judge(both)).score == 1.0


@pytest.mark.slow
async def test_pairs_of_upstream_get_their_verdict_or_a_reason() -> None:
    patient = MathVerify(workers=1)  # a pair that takes 0.5 s takes twice as long on a busy core
    rows = yaml.safe_load(Path(__file__).with_name("math_verify_pairs.yaml").read_text(encoding="utf-8"))
    agreed, differing = [], []
    for gold, answer, expected, *reason in rows:
        score = (await compared(patient, gold, answer)).score
        (agreed if score == expected else differing).append((gold, answer, bool(reason)))
    await patient.close()
    assert [row for row in differing if not row[2]] == []
    assert [row for row in agreed if row[2]] == []  # a reason that is no longer true
    assert (len(agreed), len(differing)) == (143, 14)


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        ENDLESS,
        "(10^9)!",
        "1" * 5000,
        "(" * 1500 + "1" + ")" * 1500,
        r"\int_0^1 \sin(x^{x^{x}}) dx",
        r"\left\{" * 50,
        "\0\ud800",
        "x=" * 500 + "1",
    ],
    ids=lambda answer: answer[:12].encode("ascii", "replace").decode().replace("\0", "0"),
)
async def test_hostile_answers_are_wrong_within_the_limit(answer: str, verifier: MathVerify) -> None:
    begun = resource.getrusage(resource.RUSAGE_CHILDREN)
    part = await compared(verifier, r"\frac{\pi}{7}", answer)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert part.score == 0.0
    assert spent.ru_utime - begun.ru_utime < 15  # of at most three workers that ended, with their start
    assert (await compared(verifier, "0.5", r"\frac12")).score == 1.0


@pytest.mark.slow
async def test_a_hanging_pair_does_not_hold_up_the_others() -> None:
    verifier = MathVerify(cpu_s=1.0, workers=2)
    await asyncio.gather(*(compared(verifier, "0.5", rf"\frac{{{n}}}{{{2 * n}}}") for n in (1, 2)))
    slow = asyncio.create_task(compared(verifier, r"\sqrt{4}", ENDLESS))
    assert (await compared(verifier, "0.25", r"\frac14")).score == 1.0
    assert not slow.done()
    part = await slow
    assert (part.score, part.evidence) == (
        0.0,
        f"{ENDLESS!r} is not '\\\\sqrt{{4}}' (not decided within 1 s of CPU time)",
    )
    await verifier.close()


@pytest.mark.slow
async def test_an_endless_gold_answer_is_no_fault_of_the_response(verifier: MathVerify) -> None:
    part = await compared(verifier, ENDLESS + "+1", r"\sqrt{5}")
    assert part.score is None
    assert "cannot be compared with itself: the worker used up its CPU time" in part.evidence


@pytest.mark.slow
async def test_time_without_cpu_is_not_counted_and_a_worker_that_the_machine_stops_or_kills_gives_no_score() -> (
    None
):
    verifier, others = MathVerify(cpu_s=0.3, workers=1), set(workers())
    await compared(verifier, "0.5", r"\frac12")
    (worker,) = set(workers()) - others
    os.kill(worker, signal.SIGSTOP)
    pair = asyncio.create_task(compared(verifier, "0.25", r"\frac14"))
    await asyncio.sleep(0.6)
    assert not pair.done()
    os.kill(worker, signal.SIGCONT)
    assert (await pair).score == 1.0
    assert set(workers()) - others == {worker}
    os.kill(worker, signal.SIGSTOP)
    part = await compared(verifier, "0.25", r"\frac14")
    assert part == Part(None, "math verifier unavailable: not finished within 3.6 s")
    pair = asyncio.create_task(compared(verifier, r"\sqrt{4}", r"\sqrt{5}"))
    while not pair.done():
        for worker in set(workers()) - others:
            os.kill(worker, signal.SIGKILL)
            others.add(worker)
        await asyncio.sleep(0.01)
    assert (await pair).score is None
    await verifier.close()


@pytest.mark.slow
async def test_closing_leaves_no_process_and_is_not_the_end(verifier: MathVerify) -> None:
    await compared(verifier, "0.5", r"\frac12")
    before = workers()
    await verifier.close()
    assert len(workers()) == len(before) - 1
    assert (await compared(verifier, "0.5", r"\frac12")).score == 1.0


def workers() -> list[int]:
    """Return the verifier processes of this process."""
    pids = [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
    return [int(pid) for pid in pids if "afm.rewards.verifier" in Path(f"/proc/{pid}/cmdline").read_text()]


COPIES = {  # every formula of MATH500's questions that equals the gold answer without being it
    20: "(1+2i)6-3i",
    31: r"\sqrt{242}",
    53: r"\arcsin \left( -\frac{1}{2} \right)",
    54: r"\frac{3}{20}",
    74: r"\frac{\sec x}{\sin x} - \frac{\sin x}{\cos x}",
    98: "(-k + 4) + (-2 + 3k)",
    102: "ab+5b+2a+10",
    146: r"\frac{3}{\sqrt{27}}",
    181: r"\sqrt{\sqrt[3]{\sqrt{\frac{1}{729}}}}",
    318: r"\frac{4+6a}{5}-\frac{1+3a}{4}",
    347: "4(3r^3+5r-6)-6(2r^3-r^2+4r)",
    384: "19x + 1 - 4x - 81",
    430: r"\frac{9}{2}",
    433: r"\frac{57}{160}",
}


async def test_no_formula_of_a_real_question_pays(
    shared: Callable[[str], Path], verifier: MathVerify
) -> None:
    import pyarrow.parquet as pq

    rows = pq.read_table(shared("data/code_math/math500.parquet")).to_pylist()
    for number, formula in COPIES.items():
        question, gold = rows[number]["prompt"][-1]["content"], rows[number]["reward_model"]["ground_truth"]
        assert (await compared(verifier, gold, formula)).score == 1.0
        assert (await compared(verifier, gold, formula, question)).score == 0.0
        assert (await compared(verifier, gold, gold, question)).score == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.proof)], ids=["a quarter", "all"])
async def test_real_rows_score_as_they_deserve(shared: Callable[[str], Path], step: int) -> None:
    """Gold answers score 1; a negated large number and the next row's gold answer score 0."""
    import pyarrow.parquet as pq

    tables = [pq.read_table(shared(f"data/code_math/{name}.parquet")) for name in BENCHMARKS]
    rows = [row for table in tables for row in table.to_pylist()]
    assert len(rows) == 600
    rows = rows[::step]
    golds = [row["reward_model"]["ground_truth"] for row in rows]
    reward = load_reward()
    refused, accepted = [], []
    for row, gold, following in zip(rows, golds, golds[1:] + golds[:1], strict=True):
        for answer in (gold, "-31415926", following):
            score = (await reward.score(sample(rf"\boxed{{{answer}}}", gold, row["data_source"]))).score
            if answer is gold and score != 1.0:
                refused.append(gold)
            right = quick_verdict(gold, answer) or (gold, answer) == ("5", "x=5")
            if not right and score != 0.0:
                accepted.append(f"{answer} for {gold}")
    await reward.close()
    assert (refused, accepted) == ([], [])
    assert all(algebra_verdict(gold, gold) for gold in golds)  # without the short cut for equal texts
