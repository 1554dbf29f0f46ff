import pytest

from afm.distill.filters.base import Funnel, run_filters
from afm.distill.filters.quality import QualityFilter
from afm.distill.filters.rules import FormatFilter
from afm.rewards import load_reward
from afm.trajectory.record import Record, TextSegment, Verdict

DIRECT = "<plan>Plan.</plan><think>Easy.</think><answer>\\boxed{%s}</answer>"


def record(name="a", text=DIRECT % 7, **fields):
    defaults = {
        "agent": "math",
        "agent_digest": "d",
        "question": "q?",
        "ground_truth": "7",
        "data_source": "mini_math",
        "segments": (TextSegment(author="agent", text=text),),
    }
    return Record(id=name, **{**defaults, **fields})


@pytest.fixture
async def reward():
    loaded = load_reward()
    yield loaded
    await loaded.close()


class Abstains:
    """A reward whose infrastructure is down."""

    async def score(self, sample):
        return Verdict(score=None, evidence="worker died")

    async def close(self):
        pass


async def passed(filters, *records, **options):
    return [record async for record in run_filters(records, filters, **options)]


async def test_a_right_answer_is_kept_with_its_verdict(spec, reward):
    (kept,) = await passed([QualityFilter(spec, reward)], record())

    assert (kept.kept, kept.reason) == (True, "")
    assert kept.verdict.score == 1.0
    assert kept.verdict.parts["correct"] == 1.0


async def test_a_wrong_answer_is_dropped_with_the_evidence(spec, reward):
    (dropped,) = await passed([QualityFilter(spec, reward)], record(text=DIRECT % 8))

    assert not dropped.kept
    assert dropped.reason == f"quality: score 0: {dropped.verdict.evidence}"
    assert "8" in dropped.verdict.evidence


async def test_a_recorded_score_that_is_no_number_is_not_good_enough(spec):
    verdict = Verdict(score=float("nan"))
    (dropped,) = await passed([QualityFilter(spec, Abstains(), recorded=True)], record(verdict=verdict))

    assert (dropped.kept, dropped.reason) == (False, "quality: score nan: ")


async def test_without_a_verdict_nobody_vouches_for_a_row(spec):
    (dropped,) = await passed([QualityFilter(spec, Abstains())], record())

    assert (dropped.kept, dropped.reason) == (False, "quality: no verdict: worker died")


async def test_a_broken_format_is_dropped_with_the_first_fault(spec):
    text = DIRECT.replace("<think>Easy.</think>", "") % 7

    (dropped,) = await passed([FormatFilter(spec)], record(text=text))

    assert not dropped.kept
    assert dropped.reason.startswith("format: <answer> at character 18")


async def test_later_stages_do_not_see_what_an_earlier_one_dropped(spec):
    filters = [FormatFilter(spec), QualityFilter(spec, Abstains())]

    (dropped,) = await passed(filters, record(text="no tags"))

    assert dropped.reason.startswith("format: ")
    assert dropped.verdict is None


async def test_order_is_kept_and_the_funnel_counts_by_stage(spec, reward):
    rows = [
        record("a"),
        record("b", DIRECT % 8),
        record("c", "no tags"),
        record("d", kept=False, reason="team failed: no idea"),
        record("e"),
    ]
    funnel = Funnel()

    out = await passed([FormatFilter(spec), QualityFilter(spec, reward)], *rows, parallel=2)
    for row in out:
        funnel.count(row)

    assert [row.id for row in out] == ["a", "b", "c", "d", "e"]
    assert [row.kept for row in out] == [True, False, False, False, True]
    assert (funnel.seen, funnel.kept) == (5, 2)
    assert funnel.dropped == {"quality": 1, "format": 1, "team failed": 1}
