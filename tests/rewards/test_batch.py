"""Many responses at once: order, errors, and time."""

from __future__ import annotations

import asyncio
import time

import pytest

from afm.agents import load_agent
from afm.errors import ConfigError
from afm.rewards import Sample, load_reward, score_many
from afm.trajectory import author_segments

SPEC = load_agent("math")


def sample(answer: str, source: str = "math_dapo") -> Sample:
    response = rf"<plan>p</plan><think>t</think><answer>\boxed{{{answer}}}</answer>"
    return Sample(SPEC, source, "q", author_segments(response, SPEC), r"\frac12")


async def test_verdicts_keep_the_order_of_their_samples() -> None:
    reward = load_reward({"math": {"workers": 2}})
    verdicts = await score_many(reward, map(sample, [r"\frac{2}{4}", "3", r"\frac{1}{3}", "0.5"] * 5))
    await reward.close()
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0, 0.0, 1.0] * 5


async def test_hanging_pairs_cost_their_limit_and_no_more() -> None:
    reward = load_reward({"math": {"workers": 2, "cpu_s": 1.0}})
    await score_many(reward, [sample(r"\frac{3}{6}")] * 2)
    begun = time.monotonic()
    verdicts = await score_many(reward, map(sample, ["9^{9^{9^{9}}}", r"\frac{4}{8}", "(10^9)!"]))
    assert time.monotonic() - begun < 10
    assert [verdict.score for verdict in verdicts] == [0.0, 1.0, 0.0]
    await reward.close()


async def test_a_source_without_scorer_is_an_error_and_ends_the_others() -> None:
    reward = load_reward()
    with pytest.raises(ConfigError, match="no reward for data_source 'unheard_of'"):
        await score_many(reward, [sample("1"), sample("1", "unheard_of"), sample("10^{10^{10}}")])
    await reward.close()
    assert len(asyncio.all_tasks()) == 1
