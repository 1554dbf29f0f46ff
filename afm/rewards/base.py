"""The interface of a reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from afm.agents import AgentSpec
from afm.trajectory.record import Verdict
from afm.trajectory.types import Segment


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to judge.

    Attributes:
        segments: The response by author, so that text in an observation never counts as the agent's.
        ground_truth: As in the row: str, list of str, {"target": [..]} or a JSON string of that.
        agent_tokens: Sampled tokens; ``None`` when unknown.
        response_tokens: Sampled and observed tokens, those of an observation that did not fit included; ``None`` when unknown.
        answer_alone: Whether the form counts as kept: a team's words are brought into the agent's form by us.
    """

    spec: AgentSpec
    data_source: str
    question: str
    segments: tuple[Segment, ...]
    ground_truth: Any
    agent_tokens: int | None = None
    response_tokens: int | None = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    answer_alone: bool = False


class Reward(Protocol):
    """Judges one response. Infrastructure failure is an abstaining verdict, never a score."""

    async def score(self, sample: Sample) -> Verdict:
        """Judge ``sample``; does not raise for anything the response contains."""
        ...

    async def close(self) -> None:
        """Free worker processes."""
        ...
