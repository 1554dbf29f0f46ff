"""The shipped judge of QA answers in filters and evaluation, over real HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from afm.agents import load_agent
from afm.distill.filters.quality import QualityFilter
from afm.distill.filters.registry import build_stages, load_plan
from afm.rewards import Sample, load_reward
from afm.trajectory.record import Record, Verdict
from afm.trajectory.tags import Author, Segment

CONFIGS = Path(__file__).parents[2] / "configs"
TEXT = "<think>t</think><plan>p</plan><think>t</think><answer>{}</answer>"
MATCHED = Verdict(score=0.0, evidence="exact match: differs")


def record(answer: str) -> Record:
    return Record(
        id=answer,
        agent="mhqa",
        agent_digest="d",
        question="Which city is the capital of France?",
        ground_truth=["Paris of France"],
        data_source="hotpotqa",
        segments=(Segment(Author.AGENT, TEXT.format(answer)),),
        verdict=MATCHED,
    )


async def kept(preset: str, *answers: str) -> list[tuple[bool, str]]:
    """What the quality stage of a preset decides about rows that exact match found wrong."""
    pytest.importorskip("numpy")
    stages = build_stages(load_plan(CONFIGS / f"filters/{preset}.yaml"), load_agent("mhqa"))
    [stage] = [one for one in stages if isinstance(one, QualityFilter)]
    try:
        found = [await stage.check(record(answer)) for answer in answers]
    finally:
        await stage.close()
    return [(one.kept, one.reason) for one in found]


async def test_the_filter_asks_a_model_where_the_preset_says_so(judge_server: Any) -> None:
    matched = await kept("mhqa", "of France, Paris")
    assert matched == [(False, "quality: score 0: exact match: differs")]
    assert judge_server.requests == []
    right, wrong = await kept("mhqa_judge", "of France, Paris", "London")
    assert right == (True, "")
    assert wrong == (False, "quality: score 0: judge test-judge: incorrect: As compared.")
    assert len(judge_server.requests) == 3  # the accepted answer is controlled


async def test_without_a_judge_nothing_is_matched_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRM_BASE_URL", raising=False)
    [(stays, reason)] = await kept("mhqa_judge", "Paris of France")
    assert not stays
    assert reason.startswith("quality: no verdict: no judge: set GRM_BASE_URL")


@pytest.mark.parametrize("source", ["nq", "hotpotqa", "bamboogle"])
async def test_every_question_set_has_a_judge_as_metric(judge_server: Any, source: str) -> None:
    segments = (Segment(Author.AGENT, TEXT.format("of France, Paris")),)
    sample = Sample(load_agent("mhqa"), source, "Which city?", segments, ["Paris of France"])
    scores = {}
    for name in ("qa_judge", "eval_qa"):
        reward = load_reward(CONFIGS / f"rewards/{name}.yaml")
        try:
            scores[name] = (await reward.score(sample)).score
        finally:
            await reward.close()
    assert scores == {"qa_judge": 1.0, "eval_qa": 0.0}
