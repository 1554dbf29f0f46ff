import random

import pytest

from afm.agents import load_agent
from afm.errors import DataError
from afm.evaluation import paired_difference, summarise
from afm.evaluation.metrics import passed
from afm.play import groups_of
from afm.trajectory.record import Cost, StopReason, Verdict


def test_one_round_gives_shares_and_wilsons_interval(record) -> None:
    records = [record(f"t{i}", 1.0 if i < 8 else 0.0, calls=2 if i < 5 else 0) for i in range(10)]
    metrics = summarise(records)
    assert (metrics.questions, metrics.episodes, metrics.scored, metrics.rounds) == (10, 10, 10, 1)
    score = metrics.pass_at_1
    assert (score.value, round(score.low, 4), round(score.high, 4)) == (0.8, 0.4902, 0.9433)
    assert (metrics.tool_calls, metrics.tool_use) == (1.0, 0.5)
    assert (metrics.passed_with_tool, metrics.passed_without_tool) == (1.0, 0.6)
    assert (metrics.agent_tokens, metrics.observation_tokens, metrics.seconds) == (10, 4, 0.5)
    assert (metrics.avg_at_k, metrics.pass_at_k) == (None, {})


def test_episodes_without_a_score_are_counted_and_never_wrong(record) -> None:
    failed = record("c", 0.0, verdict=None, stop=StopReason.ERROR, error="EngineError: gone", segments=())
    records = [record("a", 1.0), record("b", None), failed]
    metrics = summarise(records)
    assert (metrics.episodes, metrics.scored, metrics.abstained, metrics.errors) == (3, 1, 1, 1)
    assert (metrics.pass_at_1.value, metrics.questions, metrics.stop_reasons) == (1.0, 3, {"answer": 2})
    assert [passed(one) for one in records] == [True, None, None]
    nothing = summarise([record("a", None)])
    assert (nothing.pass_at_1, nothing.format_valid) == (None, None)
    assert summarise([]).episodes == 0


def test_several_rounds_give_avg_and_pass_at_k(record) -> None:
    # One question with 1 of 3 passed, one with 2 of 3.
    scores = {"a": (1.0, 0.0, 0.0), "b": (1.0, 1.0, 0.0)}
    metrics = summarise(record(task, row[i], number=i) for task, row in scores.items() for i in range(3))
    assert metrics.rounds == 3
    assert metrics.pass_at_1.value == metrics.avg_at_k == 0.5
    assert metrics.pass_at_k == pytest.approx({1: 0.5, 2: (2 / 3 + 1) / 2, 3: 1.0})
    # Both of two: 0 of 3 pairs, 1 of 3.
    assert metrics.pass_hat_k == pytest.approx({1: 0.5, 2: 1 / 6, 3: 0.0})
    # The bootstrap draws both questions, one of them twice, or the other: 1/3, 1/2 or 2/3.
    assert (metrics.pass_at_1.low, metrics.pass_at_1.high) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


def test_a_solved_episode_costs_what_the_failed_ones_cost_too(record) -> None:
    metrics = summarise([record("a", 1.0, calls=1), record("b", 0.0, calls=3), record("c", 0.0, calls=2)])
    assert metrics.per_solved == {"tool_calls": 6, "agent_tokens": 30, "observation_tokens": 24}
    assert summarise([record("b", 0.0, calls=3)]).per_solved == {}


def test_the_majority_of_the_rounds_answers_for_a_question(record) -> None:
    def answered(task, *answers):
        texts = [f"<plan>p</plan><think>t</think><answer>\\boxed{{{answer}}}</answer>" for answer in answers]
        rows = enumerate(zip(answers, texts, strict=True))
        return [record(task, float(answer == 42), number=n, text=text) for n, (answer, text) in rows]

    right, wrong, tie = answered("right", 7, 42, 42), answered("wrong", 7, 42, 7), answered("tie", 42, 7, 8)
    some = [*right, *wrong, *tie, *(record("none", 0.0, number=n, text="<think>?</think>") for n in range(2))]
    spec = load_agent("math")
    assert summarise(some, spec=spec).majority == summarise(some[::-1], spec=spec).majority == 0.5
    assert summarise(some).majority is None
    assert summarise(right[:1], spec=spec).majority is None


def test_unequal_rounds_count_each_question_once(record) -> None:
    # a: 4 of 4, b: 0 of 1; the mean over questions is 1/2, not 4/5.
    rows = [record("a", 1.0, number=r) for r in range(4)] + [record("b", 0.0)]
    metrics = summarise(rows)
    assert metrics.pass_at_1.value == 0.5
    assert metrics.pass_at_k == {1: 0.5, 2: 1.0, 3: 1.0, 4: 1.0}  # b has too few rounds for k > 1


def test_the_order_of_episodes_changes_nothing(record) -> None:
    rng = random.Random(0)
    rows = [
        record(f"t{i}", float(rng.random() < 0.4), number=r, cost=Cost(wall_seconds=rng.random()))
        for i in range(50)
        for r in range(3)
    ]
    shuffled = rng.sample(rows, len(rows))
    assert summarise(rows) == summarise(shuffled)


def test_several_sources_are_shown_apart(record) -> None:
    sources = (("a", 1.0, "aime24"), ("b", 0.0, "amc23"), ("c", 1.0, "amc23"))
    found = summarise([record(task, score, source=source) for task, score, source in sources]).by_source
    assert {name: score.value for name, score in found.items()} == {"aime24": 1.0, "amc23": 0.5}


def test_levels_and_topics_are_shown_apart(record) -> None:
    def row(task, score, level, number=0):
        groups = {"level": level, "category": "Art"}
        return record(task, score, provenance={"task": task, "round": number, "groups": groups})

    rows = [
        row("a", 1.0, "1"),
        row("b", 0.0, "2"),
        row("c", 1.0, "2"),
        row("c", 1.0, "2", 1),
        record("d", 0.0),
    ]
    found = summarise(rows).by_group
    assert {name: score.value for name, score in found["level"].items()} == {"1": 1.0, "2": 0.5}
    assert "category" not in found  # one value tells nothing apart
    assert groups_of({"level": 2, "domain": "x" * 81, "tests": [1], "subject": ""}) == {"level": "2"}


def test_format_and_right_answers_are_measured_apart(record) -> None:
    def row(task, correct, form):
        return record(task, 0.0, verdict=Verdict(score=0.0, parts={"correct": correct, "format": form}))

    metrics = summarise([row("a", 1.0, 0.0), row("b", 0.0, 1.0), record("c", 1.0), record("d", 1.0)])
    assert (metrics.correct, metrics.format_valid, metrics.pass_at_1.value) == (0.75, 0.75, 0.5)


def test_tool_failures_are_a_share_of_the_calls(record) -> None:
    costs = {"a": Cost(tool_calls=3, tool_failures=1), "b": Cost(tool_calls=1)}
    assert summarise(record(task, 1.0, cost=cost) for task, cost in costs.items()).tool_failure_rate == 0.25
    assert summarise([record("c", 1.0)]).tool_failure_rate is None


def test_paired_difference_counts_what_went_better_and_worse(record) -> None:
    before = [record(f"t{i}", float(i < 4)) for i in range(10)]  # 0..3 passed
    after = [record(f"t{i}", float(i >= 1 and i < 9)) for i in range(10)]  # 1..8 passed
    result = paired_difference(before, after)
    assert (result.questions, result.gained, result.lost) == (10, 5, 1)
    assert result.difference.value == pytest.approx(0.4)
    assert result.difference.low < 0.4 < result.difference.high
    assert paired_difference(after, before).difference.value == pytest.approx(-0.4)


def test_paired_difference_of_a_constant_gain_is_not_certain(record) -> None:
    before = [record(f"t{i}", 0.0) for i in range(5)]
    after = [record(f"t{i}", 1.0) for i in range(5)]
    difference = paired_difference(before, after).difference
    assert (difference.value, difference.high) == (1.0, 1.0)
    assert difference.low == pytest.approx(5 / (5 + 1.959964**2))  # Wilson's lower end for 5 of 5
    nothing = paired_difference(before, before).difference
    assert (nothing.value, nothing.low) == (0.0, -nothing.high)
    assert nothing.high == pytest.approx(1 - difference.low)


def test_paired_difference_pairs_all_rounds_of_the_common_scored_questions(record) -> None:
    before = [record("a", 0.0), record("b", 1.0), record("c", None)]
    after = [record("a", 1.0), record("c", 1.0), record("d", 1.0)]
    assert paired_difference(before, after).questions == 1
    rounds = [*before, record("a", 1.0, number=1)]
    assert paired_difference(rounds, after).difference.value == 0.5


def test_runs_without_a_common_question_cannot_be_compared(record) -> None:
    with pytest.raises(DataError, match="no scored question in common"):
        paired_difference([record("a", 1.0)], [record("b", 1.0)])
    with pytest.raises(DataError, match="'a' is another question"):
        paired_difference([record("a", 1.0)], [record("a", 1.0, question="something else")])
