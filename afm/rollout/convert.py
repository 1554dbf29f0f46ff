"""From an episode to the line that is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.agents import AgentSpec
from afm.rollout.episode import Episode
from afm.trajectory.record import Record, TextSegment, Verdict


def episode_record(
    episode: Episode,
    spec: AgentSpec,
    *,
    id: str,  # noqa: A002 - the field's name
    question: str,
    ground_truth: Any = None,
    data_source: str = "",
    model: str = "",
    seed: int | None = None,
    verdict: Verdict | None = None,
    provenance: Mapping[str, Any] | None = None,
    with_tokens: bool = False,
) -> Record:
    """The record of ``episode``; with ``with_tokens`` it also holds ids, mask and log-probabilities."""
    return Record(
        id=id,
        agent=spec.name,
        agent_digest=spec.digest,
        question=question,
        segments=tuple(TextSegment(author=part.author, text=part.text) for part in episode.segments),
        ground_truth=ground_truth,
        data_source=data_source,
        model=model,
        seed=seed,
        stop=episode.stop,
        verdict=verdict,
        cost=episode.cost,
        calls=episode.calls,
        prompt_ids=episode.prompt_ids if with_tokens else None,
        response_ids=episode.response_ids if with_tokens else None,
        response_mask=episode.response_mask if with_tokens else None,
        logprobs=episode.logprobs if with_tokens else None,
        provenance=dict(provenance or {}),
    )
