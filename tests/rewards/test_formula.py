"""Formulas: what they compute, that they are not Python; the overlong penalty, worked out by hand."""

from __future__ import annotations

import pytest

from afm.agents import load_agent
from afm.errors import ConfigError
from afm.rewards import Sample
from afm.rewards.base import CountedTokens, Formula, OverlongPenalty
from afm.trajectory.tags import Author, Segment

NAMES = ("correct", "format", "overlong")
PARTS = {"correct": 1.0, "format": 0.5, "overlong": -0.25}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("correct * format + overlong", 0.25),
        ("0.1 * format + 0.9 * correct", 0.95),
        ("max(0, overlong)", 0.0),
        ("min(correct, format, 0.2) - -1", 1.2),
        ("-(1 - format)", -0.5),
    ],
)
def test_values(text: str, value: float) -> None:
    assert Formula(text, NAMES)(PARTS) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max(correct, fromat)", "unknown name 'fromat', did you mean 'format'"),
        ("correct ** 9", r"'correct \*\* 9' is not allowed"),
        ("__import__('os')", "is not allowed"),
        ("max(correct)", "is not allowed"),
        ("max(1, 2, key=abs)", "is not allowed"),
        ("True", "'True' is not allowed"),
        ("", "is not an expression"),
        ("correct * 1e400", "'1e309' is not allowed"),
        ("correct * 1e9", "'1000000000.0' is not allowed; expected numbers up to 1000000"),
        ("(" * 300 + "1" + ")" * 300, "is not an expression"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Formula(text, NAMES)


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
