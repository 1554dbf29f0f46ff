"""Our scores beside those of the published evaluators (open-compass/T-Eval, commit 58f2240) on the same items and replies.

``published_figures.json`` was recorded by running those evaluators: for each reply the score with word counts in place of the
sentence model, the score with all-mpnet-base-v2 itself, and whether the reply could be read. Items and replies are ours.
"""

import json
import os
from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.datasets.readers import READERS
from afm.rewards import Sample, load_reward
from afm.trajectory.tags import Author, Segment

SPEC = load_agent("configs/eval/agents/chat.yaml")
CASES = json.loads(Path(__file__).with_name("published_figures.json").read_text("utf-8"))
MODEL = "AFM_TEST_SENTENCE_MODEL"
"""Variable that names a folder of all-mpnet-base-v2."""


def task_of(case):
    reader = READERS["t_eval"]
    tasks = [reader.read(row, "d") for row in reader.unpack(case["file"], {"q": case["item"]})]
    (task,) = [task for task in tasks if task.extra_info["t_eval"]["kind"] == case["kind"]]
    return task


async def ours(embeddings):
    """Case, reply, our score and whether we could read it."""
    reward = load_reward({"formula": "correct", "t_eval": {"embeddings": embeddings}})
    scores = []
    for case in CASES:
        task = task_of(case)
        for figures in case["figures"]:
            segments = (Segment(Author.AGENT, figures[0]),)
            sample = Sample(
                SPEC, task.data_source, "q", segments, task.ground_truth, extra_info=task.extra_info
            )
            verdict = await reward.score(sample)
            scores.append((case["kind"], figures, verdict.score, verdict.parts["format"]))
    await reward.close()
    return scores


def differences(scores, column):
    """Published figures are rounded at the fourth digit (instruct), or 0.99999 where all is right (understand)."""
    return [
        (kind, figures, score, readable)
        for kind, figures, score, readable in scores
        if abs(score - figures[column]) > 3e-5 or readable != figures[3]
    ]


async def test_all_six_abilities_score_as_the_published_evaluators() -> None:
    scores = await ours("words")
    assert {kind for kind, *_ in scores} == {"instruct", "plan", "reason", "retrieve", "understand", "review"}
    assert len(scores) > 150
    assert not differences(scores, 1)


@pytest.mark.slow
async def test_plans_and_reasons_score_as_published_with_the_published_model() -> None:
    folder = os.environ.get(MODEL)
    if not folder:
        pytest.skip(f"{MODEL} names no folder of all-mpnet-base-v2")
    pytest.importorskip("sentence_transformers")
    assert not differences(await ours(folder), 2)
