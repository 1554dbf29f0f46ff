"""An episode as the record that is written to disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.agents.spec import AgentSpec
from afm.rollout.episode import Episode
from afm.trajectory.record import Record, TextSegment, Verdict


def episode_record(
    episode: Episode,
    spec: AgentSpec,
    *,
    id: str,  # noqa: A002 - the record's own word
    question: str,
    ground_truth: Any = None,
    data_source: str = "",
    model: str = "",
    seed: int | None = None,
    verdict: Verdict | None = None,
    provenance: Mapping[str, Any] | None = None,
    with_tokens: bool = True,
) -> Record:
    """One line of an episodes file.

    Args:
        episode: What happened.
        spec: The agent it happened with.
        id: Unique in the file.
        question: What was asked.
        ground_truth: What the reward compared with.
        data_source: Where the question comes from.
        model: Name of the model.
        seed: Seed of the episode.
        verdict: What the reward says, if it was asked.
        provenance: How this line came about.
        with_tokens: Keep token ids, mask and log-probabilities.
    """
    tokens: dict[str, Any] = {}
    if with_tokens:
        tokens = {
            "prompt_ids": episode.prompt_ids,
            "response_ids": episode.response_ids,
            "response_mask": episode.response_mask,
            "logprobs": episode.logprobs or None,
        }
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
        provenance=dict(provenance or {})
        | ({"protocol": dict(episode.protocol)} if episode.protocol else {}),
        **tokens,
    )
