"""Soft overlong punishment, worked out by hand."""

from __future__ import annotations

import pytest

from afm.agents import load_agent
from afm.rewards import Sample
from afm.rewards.formula import CountedTokens, OverlongPenalty
from afm.trajectory.types import Author, Segment


def sample(agent_tokens: int | None, response_tokens: int | None) -> Sample:
    spec = load_agent("math")
    return Sample(spec, "aime24", "q", (Segment(Author.AGENT, "x"),), "1", agent_tokens, response_tokens)


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0), (800, 0), (801, -0.005), (900, -0.5), (999, -0.995), (1000, -1), (5000, -1)],
)
async def test_linear_over_the_buffer(tokens: int, penalty: float) -> None:
    part = await OverlongPenalty(1000, 200).judge(sample(10, tokens))
    assert part.score == pytest.approx(penalty)


async def test_the_agents_tokens_alone_on_request() -> None:
    everything = await OverlongPenalty(1000, 200).judge(sample(100, 900))
    agent = await OverlongPenalty(1000, 200, CountedTokens.AGENT).judge(sample(100, 900))
    assert (agent.score, everything.score) == (0.0, -0.5)


async def test_an_unknown_length_has_no_penalty_and_no_score() -> None:
    part = await OverlongPenalty(1000, 200).judge(sample(900, None))
    assert part.score is None
    assert "response tokens is unknown" in part.evidence
