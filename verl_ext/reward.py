"""Our rewards as a custom reward function, for users of verl's own agent loops.

``reward.custom_reward_function.path=pkg://verl_ext.reward``, ``name=compute_score`` and, under
``reward_kwargs``, the ``agent`` and optionally the ``rewards`` YAML. Our own agent loop scores its episodes
itself and knows more: who wrote what, and how many tokens. Here the authors are read off the text, so an
observation that the model forged counts as one, and lengths are unknown (no overlong shaping).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec, load_agent
from afm.errors import RewardError
from afm.rewards import Reward, Sample, load_reward
from afm.trajectory import author_segments
from verl_ext.group_guard import refuse_non_finite


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    agent: str = "math",
    rewards: str | None = None,
    **unused: Any,
) -> dict[str, float]:
    """Score one response; every key but ``score`` becomes a metric.

    Raises:
        RewardError: The reward abstained or is no finite number: verl then leaves the sample out, and never counts it as wrong.
    """
    spec, reward = _judges(agent, rewards)
    info = dict(extra_info or {})
    verdict = await reward.score(
        Sample(
            spec=spec,
            data_source=data_source,
            question=str(info.get("question", "")),
            segments=author_segments(solution_str, spec),
            ground_truth=ground_truth,
            extra_info=info,
        )
    )
    if verdict.score is None:
        raise RewardError(f"the reward abstained (data_source {data_source!r}): {verdict.evidence}")
    refuse_non_finite(
        {**verdict.parts, "score": verdict.score},
        data_source=data_source,
        episode=f"of question {info.get('index', info.get('question'))!r}",
    )
    solved = verdict.parts.get("correct", 0.0) * verdict.parts.get("format", 0.0)
    return {"score": verdict.score, "acc": solved, **verdict.parts}


@cache
def _judges(agent: str, rewards: str | None) -> tuple[AgentSpec, Reward]:
    return load_agent(agent), load_reward(None if rewards is None else Path(rewards))
