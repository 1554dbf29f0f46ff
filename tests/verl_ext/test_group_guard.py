from typing import Any

import pytest

from verl_ext.group_guard import GroupFate, GroupLedger, GroupsAlikeError, SampleGroup, ShortBatch, spread
from verl_ext.metrics import documented, validation_means


def group(*scores: float, abstained: int = 0) -> SampleGroup:
    scored = ({"acc": score, "abstained": 0.0, "tool_calls": 2 * score} for score in scores)
    return SampleGroup([*scored, *[{"acc": 0.0, "abstained": 1.0}] * abstained])


HOPELESS, SOLVED, MIXED = group(0, 0, 0, 0), group(1, 1, 1, 1), group(1, 0, 0, 0)


def ledger(*groups: SampleGroup, **changes: Any) -> GroupLedger:
    options: dict[str, Any] = {"metric": "acc", "batch_groups": 2, "expected": 4, "max_gen_batches": 3}
    book = GroupLedger(**options | changes)
    book.start(step=7)
    for number, samples in enumerate(groups):
        book.add(f"group {number}", samples)
    return book


@pytest.mark.parametrize(
    ("samples", "metric", "expected", "fate"),
    [
        (MIXED, "acc", 4, GroupFate.KEPT),
        (HOPELESS, "acc", 4, GroupFate.ALIKE),
        (group(1, 1, 1, abstained=1), "acc", 4, GroupFate.ALIKE),
        (group(1, 0, abstained=2), "acc", 4, GroupFate.KEPT),
        (group(1, abstained=3), "acc", 4, GroupFate.VOID),
        (SampleGroup([]), "acc", 4, GroupFate.VOID),
        (SOLVED, None, 4, GroupFate.KEPT),  # without filtering
        (group(1, abstained=3), None, 4, GroupFate.VOID),
        (group(1), "acc", 1, GroupFate.KEPT),  # a single sample is compared with nothing
    ],
)
def test_a_group_is_kept_when_its_scored_samples_differ(
    samples: SampleGroup, metric: str | None, expected: int, fate: GroupFate
) -> None:
    assert samples.fate(metric, expected) is fate


def test_the_run_ends_after_the_allowed_batches_without_a_full_one() -> None:
    ledger(*[HOPELESS] * 5).check()
    with pytest.raises(GroupsAlikeError) as caught:
        ledger(*[HOPELESS] * 5, SOLVED).check()
    message = str(caught.value)
    assert "step 7: 6 groups of 4 samples were generated (3 training batches), but only 0 of the 2" in message
    assert "In 6 groups, all samples have the same 'acc' (5 x 0, 1 x 1)." in message
    assert "the reward cannot be earned" in message
    with pytest.raises(GroupsAlikeError, match="too easy"):
        ledger(SOLVED, SOLVED, max_gen_batches=1).check()


def test_abstaining_rewards_are_named_as_the_cause() -> None:
    book = ledger(max_gen_batches=1)
    for why in ("no gold answer", "another reason"):
        book.add(why, group(abstained=4), why)
    message = r"In 2 groups, the reward abstained: no gold answer\. Repair the data"
    with pytest.raises(GroupsAlikeError, match=message):
        book.check()


def test_a_filled_batch_never_ends_the_run() -> None:
    book = ledger(MIXED, HOPELESS, MIXED, HOPELESS, max_gen_batches=1)
    book.check()
    assert not book.exhausted


def test_a_batch_that_may_be_filled_up_ends_the_run_only_without_any_signal() -> None:
    options: Any = {"max_gen_batches": 1, "short_batch": ShortBatch.FILL}
    assert not ledger(SOLVED, **options).exhausted
    book = ledger(SOLVED, MIXED, **options)
    assert book.exhausted
    book.check()
    with pytest.raises(GroupsAlikeError):
        ledger(HOPELESS, HOPELESS, **options).check()


def test_a_step_that_may_be_filled_up_waits_for_a_signal_while_groups_are_solved() -> None:
    options: Any = {"max_gen_batches": 1, "short_batch": ShortBatch.FILL}
    book = ledger(*[SOLVED] * 7, **options)
    assert not book.exhausted
    book.check()
    book.add("mixed", MIXED)
    assert book.exhausted  # the batch is filled up
    book.check()
    message = r"8 groups .* \(4 training batches\).* The prompts are too easy: .* To continue anyway, raise algorithm\.filter_groups\.max_num_gen_batches"
    with pytest.raises(GroupsAlikeError, match=message):
        ledger(*[SOLVED] * 8, **options).check()
    for unsolved in ((SOLVED, HOPELESS), (HOPELESS, SOLVED), (group(abstained=4), SOLVED)):
        assert ledger(*unsolved, **options).exhausted


def test_zero_means_no_bound() -> None:
    book = ledger(*[HOPELESS] * 100, max_gen_batches=0)
    assert not book.exhausted
    book.check()


def test_tokens_of_groups_that_are_not_trained_on_are_counted() -> None:
    book = ledger()
    for uid, score in (("taken", 0.0), ("alike", 1.0), ("too many", 0.0)):
        book.add(uid, SampleGroup([{"acc": 1.0, "agent_tokens": 10.0}, {"acc": score, "agent_tokens": 10.0}]))
    book.settle(trained=["taken"], waiting=[])
    metrics = book.metrics()
    assert (metrics["groups/agent_tokens"], metrics["groups/unused_share"]) == (60, pytest.approx(2 / 3))
    assert [metrics[f"groups/{key}"] for key in ("generated", "kept", "alike", "surplus")] == [3, 2, 1, 1]
    assert documented(1, metrics)["groups_surplus"] == 1


def counts(book: GroupLedger) -> tuple[float, float]:
    return book.metrics()["groups/generated"], book.metrics()["rollout/acc"]


def test_a_group_that_waits_for_a_later_step_belongs_to_that_one() -> None:
    book = ledger()
    book.add("first", MIXED)
    book.add("ahead", group(1, 1, 1, 0))
    book.settle(trained=["first"], waiting=["first", "ahead"])
    assert counts(book) == (1, 0.25)
    assert book.metrics()["groups/surplus"] == 0
    book.start(step=8)
    book.add("second", group(1, 1, 0, 0))
    book.settle(trained=["ahead", "second"], waiting=[])
    assert counts(book) == (2, 0.625)


def test_a_group_that_is_finished_between_two_steps_belongs_to_the_second() -> None:
    """verl's asynchronous trainers count finished groups before they take a batch."""
    book = ledger()
    book.add("first", MIXED)
    book.settle(trained=["first"], waiting=[])
    book.add("between", group(1, 1, 1, 0))
    book.start(step=8)
    book.settle(trained=["between"], waiting=[])
    assert counts(book) == (1, 0.75)


def test_metrics_are_over_every_scored_sample_dropped_groups_included() -> None:
    metrics = ledger(group(1, 0, 0, abstained=1), SOLVED, HOPELESS).metrics()
    none = ("agent_tokens", "unused_share", "void", "fillers", "failed_samples")
    assert metrics == {f"groups/{name}": 0 for name in none} | {
        "groups/generated": 3,
        "groups/kept": 1,
        "groups/alike": 2,
        "groups/alike_solved": 1,
        "groups/alike_failed": 1,
        "groups/surplus": 1,
        "groups/abstained_samples": 1,
        "rollout/acc": 5 / 11,
        "rollout/tool_calls": 10 / 11,
    }


def test_parts_of_the_reward_are_reported_by_source() -> None:
    rows = [("nq", 1.0, 1.0), ("nq", 0.0, 1.0), ("hle", 0.0, 0.0)]
    names = ("data_source", "acc", "correct", "format")
    book = ledger(
        SampleGroup([dict(zip(names, (name, acc, acc, form), strict=True)) for name, acc, form in rows])
    )
    row = documented(3, book.metrics())
    assert row["by_source"] == {
        "hle": {"acc": 0.0, "correct": 0.0, "format": 0.0},
        "nq": {"acc": 0.5, "correct": 0.5, "format": 1.0},
    }
    assert row["correct"] == pytest.approx(1 / 3)


def test_facts_and_groups_are_reported_by_agent() -> None:
    def samples(agent: str, *solved: float) -> SampleGroup:
        return SampleGroup([{"agent": agent, "acc": acc, "tool_calls": 3 * acc} for acc in solved])

    metrics = ledger(samples("code", 1.0, 0.0), samples("math", 1.0, 1.0), expected=2).metrics()
    assert documented(1, metrics)["by_agent"] == {
        "code": {"acc": 0.5, "tool_calls": 1.5, "groups": 1.0, "groups_kept": 1.0},
        "math": {"acc": 1.0, "tool_calls": 3.0, "groups": 1.0, "groups_kept": 0.0},
    }
    assert not any(key.startswith("rollout/agent") for key in metrics)


def test_a_validation_is_reported_by_agent() -> None:
    facts = {"acc": [1.0, 0.0, None], "agent": ["math", "code", "code"], "tool_calls": [1, 2, 4]}
    row = documented(1, validation_means(["a", "b", "b"], facts))
    assert row["validation_by_agent"] == {
        "code": {"acc": 0.0, "tool_calls": 3.0},
        "math": {"acc": 1.0, "tool_calls": 1.0},
    }


@pytest.mark.parametrize(
    ("padding", "workers", "order"),
    [
        ("..--", 1, [0, 2, 1, 3]),
        ("....-", 1, [0, 1, 4, 2, 3]),
        ("...-..--", 2, [0, 1, 3, 2, 4, 6, 5, 7]),
        ("......", 2, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_padding_is_spread_over_the_rows_of_each_worker(padding: str, workers: int, order: list[int]) -> None:
    assert spread([sign == "-" for sign in padding], workers) == order
